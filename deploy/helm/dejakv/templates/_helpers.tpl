{{- define "dejakv.name" -}}
{{- if contains "dejakv" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-dejakv" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- define "dejakv.selector" -}}
app.kubernetes.io/name: dejakv
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dejakv.labels" -}}
{{ include "dejakv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* The connector's settings. Kubernetes puts the variable's value in place of $(DEJAKV_FEED). */ -}}
{{- define "dejakv.connector" -}}
{{- $keys := merge (dict "store" (required "store: give the bucket that the servers share, such as s3://BUCKET/PREFIX" .Values.store) "disk_dir" "/var/cache/dejakv") .Values.connector -}}
{{- if or .Values.valkey.enabled .Values.feed.secret }}{{ $keys = merge (dict "feed" "$(DEJAKV_FEED)") $keys }}{{ end -}}
{{- dict "kv_connector" "DejaKVConnector" "kv_connector_module_path" "dejakv.engines.vllm.connector" "kv_role" "kv_both" "kv_connector_extra_config" $keys | toJson -}}
{{- end -}}
