-- End tickets before their time. What was revoked before is not revoked anew.
-- KEYS: 1 revoked ZSET
-- ARGV: 1 "session_id:<id>" or "api_key_id:<id>" that they have in common, 2 ms after which none of them is valid any more, 3 most entries, of which the oldest go
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - 1000 * tonumber(ARGV[2])))
local newest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local at = math.max(now, newest[2] and tonumber(newest[2]) + 1 or 0)
redis.call('ZADD', KEYS[1], 'NX', string.format('%.0f', at), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
