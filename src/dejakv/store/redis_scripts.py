"""Atomic operations of a Redis server, so that clients never see half of one. Scripts are Lua, the language of `EVAL`.

Each takes the namespace's prefix as its key. The order is a sorted set: by `lru` an id's score is the clock at its last use,
by `lfu` hits * 2**32 + that clock (a double holds 2**21 hits beside it). Children leave before their parents, and nodes with
their last child, as in `order`. Scripts that remove entries return them as [id, partition, reason], reason empty unless a prompt
was evicted.
"""

_COMMON = """
local p = KEYS[1]
local gone = {}

local function is_node(id) return redis.call('SISMEMBER', p .. 'nodes', id) == 1 end
local function has_children(id) return redis.call('EXISTS', p .. 'k:' .. id) == 1 end
local function size_of(id) return tonumber(redis.call('HGET', p .. 'sizes', id) or '0') end

local function resize(id, part, size)
    local by = size - size_of(id)
    redis.call('HSET', p .. 'sizes', id, size)
    redis.call('INCRBY', p .. 'bytes', by)
    redis.call('HINCRBY', p .. 'held', part, by)
end

-- All of an entry but the set of its children. Returns its partition and its parent; nothing if it is unknown.
local function forget(id)
    local part = redis.call('HGET', p .. 'parts', id)
    redis.call('DEL', p .. 'm:' .. id, p .. 'c:' .. id, p .. 'n:' .. id)
    redis.call('ZREM', p .. 'order', id)
    if not part then return end
    local parent = redis.call('HGET', p .. 'parents', id)
    resize(id, part, 0)
    redis.call('HDEL', p .. 'sizes', id)
    redis.call('HDEL', p .. 'parts', id)
    redis.call('HDEL', p .. 'parents', id)
    redis.call('SREM', p .. 'nodes', id)
    redis.call('SREM', p .. 'p:' .. part, id)
    redis.call('SREM', p .. 'q:' .. part, id)
    if parent then redis.call('SREM', p .. 'k:' .. parent, id) end
    return part, parent
end

-- Nodes that have lost their last child, from this one upwards.
local function without_childless(id, kept)
    while id and id ~= kept and is_node(id) and not has_children(id) do
        local part, parent = forget(id)
        gone[#gone + 1] = {id, part or '', ''}
        id = parent
    end
end

local function remove(id, kept, reason)
    local node = is_node(id)
    local part, parent = forget(id)
    if part then gone[#gone + 1] = {id, part, node and '' or reason} end
    without_childless(parent, kept)
end

local function discard(id)
    local parent = redis.call('HGET', p .. 'parents', id)
    local waiting, found = {id}, {}
    while #waiting > 0 do
        local one = table.remove(waiting)
        found[#found + 1] = one
        for _, child in ipairs(redis.call('SMEMBERS', p .. 'k:' .. one)) do waiting[#waiting + 1] = child end
    end
    for number = #found, 1, -1 do
        local part = forget(found[number])
        if part then gone[#gone + 1] = {found[number], part, ''} end
    end
    without_childless(parent, nil)
end

local function become_node(id, reason)
    if redis.call('EXISTS', p .. 'n:' .. id) == 0 then return discard(id) end -- the server itself has evicted it
    local part = redis.call('HGET', p .. 'parts', id)
    local less = redis.call('STRLEN', p .. 'm:' .. id)
    redis.call('RENAME', p .. 'n:' .. id, p .. 'm:' .. id)
    redis.call('SADD', p .. 'nodes', id)
    redis.call('SADD', p .. 'q:' .. part, id)
    resize(id, part, size_of(id) - less)
    gone[#gone + 1] = {id, part, reason}
end

local function first(stay, with_children)
    local start = 0
    while true do
        local page = redis.call('ZRANGE', p .. 'order', start, start + 63)
        if #page == 0 then return nil end
        for _, id in ipairs(page) do
            if not stay[id] and has_children(id) == with_children and not (with_children and is_node(id)) then return id end
        end
        start = start + 64
    end
end

local function prompts() return redis.call('ZCARD', p .. 'order') - redis.call('SCARD', p .. 'nodes') end

-- Whether what must stay for a chunk leaves it room.
local function fits(size, parent, max_bytes)
    while max_bytes > 0 and parent do
        size = size + size_of(parent)
        parent = redis.call('HGET', p .. 'parents', parent)
    end
    return max_bytes == 0 or size <= max_bytes
end

-- kept: an entry of which the rows must stay; child: another that stays
local function make_room(size, entries, kept, child, max_bytes, max_entries)
    local stay = {}
    if child then stay[child] = true end
    while true do
        local bytes = tonumber(redis.call('GET', p .. 'bytes') or '0')
        local reason
        if max_bytes > 0 and bytes + size > max_bytes then reason = 'bytes'
        elseif max_entries > 0 and prompts() + entries > max_entries then reason = 'entries'
        else return end
        local leaves = {[kept or ''] = true, [child or ''] = true}
        local victim = first(leaves, false)
        if victim then
            remove(victim, kept, reason)
        else
            local inner = reason == 'entries' and first(stay, true)
            if not inner then return end
            become_node(inner, reason)
        end
    end
end

-- values: id, partition, size, parent, node or not, description, tensor, description as a node
local function write(values, score)
    local id, part, parent = values[1], values[2], values[4]
    redis.call('SET', p .. 'm:' .. id, values[6])
    redis.call('SET', p .. 'c:' .. id, values[7])
    if values[8] ~= '' then redis.call('SET', p .. 'n:' .. id, values[8]) end
    redis.call('ZADD', p .. 'order', score or redis.call('INCR', p .. 'clock'), id)
    redis.call('HSET', p .. 'parts', id, part)
    redis.call('SADD', p .. 'p:' .. part, id)
    if values[5] == '1' then
        redis.call('SADD', p .. 'nodes', id)
        redis.call('SADD', p .. 'q:' .. part, id)
    end
    if parent ~= '' then
        redis.call('HSET', p .. 'parents', id, parent)
        redis.call('SADD', p .. 'k:' .. parent, id)
    end
    resize(id, part, tonumber(values[3]))
end

local function values_from(at)
    local values = {}
    for number = 1, 8 do values[number] = ARGV[at + number - 1] end
    return values
end
"""

PUT = (
    _COMMON
    + """
local max_bytes, max_entries = tonumber(ARGV[1]), tonumber(ARGV[2])
local new = values_from(3)
local id, size, parent = new[1], tonumber(new[3]), new[4]
local above = parent ~= '' and parent or nil
-- An entry of an older version has no description as a node, and can be no parent.
if above and redis.call('HGET', p .. 'parts', above) ~= new[2] then return 'parent' end
if above and not is_node(above) and redis.call('EXISTS', p .. 'n:' .. above) == 0 then return 'parent' end
if not fits(size, above, max_bytes) then return 'too_large' end
-- First of all a write that needs memory: a server that has none refuses it, and only it, before anything is changed.
redis.call('SET', p .. 'm:' .. id, new[6])
local _, before = forget(id)
make_room(size, new[5] == '1' and 0 or 1, above, nil, max_bytes, max_entries)
write(new)
if before ~= above then without_childless(before, nil) end
return gone
"""
)
"""ARGV: max_bytes, max_entries, then `values` of the chunk. Returns the reason if it is refused."""

SPLIT = (
    _COMMON
    + """
local max_bytes, max_entries = tonumber(ARGV[1]), tonumber(ARGV[2])
local node, rest = values_from(3), values_from(11)
local id, above = rest[1], node[4] ~= '' and node[4] or nil
local score = redis.call('ZSCORE', p .. 'order', id)
local same = (redis.call('HGET', p .. 'parents', id) or nil) == above and (is_node(id) and '1' or '0') == rest[5]
if not score or not same or redis.call('ZSCORE', p .. 'order', node[1]) then return 'changed' end
-- Of a node one child stays, without which it would be none.
local child = rest[5] == '1' and redis.call('SRANDMEMBER', p .. 'k:' .. id) or nil
local size = tonumber(node[3]) + tonumber(rest[3])
if not fits(size + (child and size_of(child) or 0), above, max_bytes) then return 'too_large' end
redis.call('SET', p .. 'm:' .. node[1], node[6])
forget(id)
make_room(size, (node[5] == '1' and 0 or 1) + (rest[5] == '1' and 0 or 1), above, child, max_bytes, max_entries)
write(node)
write(rest, score)
return gone
"""
)
"""ARGV: max_bytes, max_entries, then `values` of the node and of the rest. Returns the reason if it is refused."""

DROP = (
    _COMMON
    + """
local id = ARGV[1]
if not redis.call('HGET', p .. 'parts', id) then
    forget(id)
elseif not has_children(id) then
    remove(id, nil, '')
elseif not is_node(id) then
    become_node(id, '')
end
return gone
"""
)
"""ARGV: id. A prompt leaves."""

DISCARD = (
    _COMMON
    + """
discard(ARGV[1])
return gone
"""
)
"""ARGV: id. An entry leaves with all that need its rows, children first."""

TOUCH = """
local p, id = KEYS[1], ARGV[1]
local score = redis.call('ZSCORE', p .. 'order', id)
if not score then return 0 end
local clock = redis.call('INCR', p .. 'clock')
local hits = 0
if ARGV[2] == 'lfu' then hits = math.floor(tonumber(score) / 4294967296) + 1 end
redis.call('ZADD', p .. 'order', string.format('%.0f', hits * 4294967296 + clock), id)
return 1
"""
"""ARGV: id, policy. Notes a use of a known entry."""
