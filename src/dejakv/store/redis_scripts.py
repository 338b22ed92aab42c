"""Atomic operations of a Redis server, so that clients never see half of one. Scripts are Lua, the language of `EVAL`.

Each takes the namespace's prefix as its key. The order is a sorted set: by `lru` an id's score is the clock at its last use,
by `lfu` hits * 2**32 + that clock (a double holds 2**21 hits beside it).
"""

_DROP = """
local p = KEYS[1]
local function drop(id)
    local size = redis.call('HGET', p .. 'sizes', id)
    local part = redis.call('HGET', p .. 'parts', id)
    redis.call('DEL', p .. 'm:' .. id, p .. 'c:' .. id)
    redis.call('ZREM', p .. 'order', id)
    redis.call('HDEL', p .. 'sizes', id)
    redis.call('HDEL', p .. 'parts', id)
    if size then
        redis.call('DECRBY', p .. 'bytes', size)
        redis.call('SREM', p .. 'p:' .. part, id)
        redis.call('HINCRBY', p .. 'held', part, -size)
    end
    return size, part
end
"""

DROP = (
    _DROP
    + """
return drop(ARGV[1]) and 1 or 0
"""
)
"""ARGV: id. Removes an entry; 1 if it existed."""

PUT = (
    _DROP
    + """
local id, part, size = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_bytes, max_entries, policy = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local gone = {}
-- First of all a write that needs memory: a server that has none refuses it, and only it, before anything is changed.
redis.call('SET', p .. 'm:' .. id, ARGV[7])
drop(id)
while true do
    local bytes = tonumber(redis.call('GET', p .. 'bytes') or '0')
    local reason
    if max_bytes > 0 and bytes + size > max_bytes then reason = 'bytes'
    elseif max_entries > 0 and redis.call('ZCARD', p .. 'order') >= max_entries then reason = 'entries'
    else break end
    local victim = redis.call('ZRANGE', p .. 'order', 0, 0)[1]
    if not victim then break end
    local _, of = drop(victim)
    gone[#gone + 1] = {victim, of or '', reason}
end
local clock = redis.call('INCR', p .. 'clock')
redis.call('SET', p .. 'm:' .. id, ARGV[7])
redis.call('SET', p .. 'c:' .. id, ARGV[8])
redis.call('ZADD', p .. 'order', clock, id)
redis.call('HSET', p .. 'sizes', id, size)
redis.call('HSET', p .. 'parts', id, part)
redis.call('SADD', p .. 'p:' .. part, id)
redis.call('INCRBY', p .. 'bytes', size)
redis.call('HINCRBY', p .. 'held', part, size)
return gone
"""
)
"""ARGV: id, partition, bytes, max_bytes, max_entries, policy, description, tensor. Returns [id, partition, reason] of each
entry that was evicted for it."""

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
