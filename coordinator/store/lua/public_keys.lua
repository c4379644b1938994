-- Vouch for a coordinator's own public key and return the keys of all coordinators.
-- KEYS: 1 public-keys ZSET
-- ARGV: 1 own entry "key id:hex", 2 ms after which a key that no coordinator vouches for is forgotten
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - tonumber(ARGV[2])))
return redis.call('ZRANGE', KEYS[1], 0, -1)
