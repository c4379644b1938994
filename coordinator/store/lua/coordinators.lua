-- Renew a coordinator's lease.
-- KEYS: 1 coordinators ZSET
-- ARGV: 1 its id, 2 lease ms
-- Returns the ids of all coordinators whose lease has not ended.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
return redis.call('ZRANGE', KEYS[1], 0, -1)
