-- Tell what has changed for all verifiers, and the limits that operators have set for some tenants.
-- KEYS: 1 revoked ZSET, 2 exhausted ZSET, 3 bounds STRING, 4 tenant-limits HASH
-- ARGV: 1 time of the last revocation that the verifier knows, 2 most revocations and 3 most exhausted tenants in the
--       reply, then the tenants
-- Returns {{later revocations with their times}, {tenants whose tokens are used up}, bounds of sessions' windows ('' none),
--       {limits of each tenant ('' none)}}.
local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
-- A time after the newest one's is of a store that has been lost: all are told again.
local newest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local seen = newest[2] and tonumber(ARGV[1]) > tonumber(newest[2]) and '0' or ARGV[1]
local revoked = {}
if newest[2] and tonumber(newest[2]) > tonumber(seen) then
  revoked = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. seen, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
end
local exhausted = redis.call('ZRANGEBYSCORE', KEYS[2], now, '+inf', 'LIMIT', 0, ARGV[3])
local limits = {}
for i = 4, #ARGV do
  limits[#limits + 1] = redis.call('HGET', KEYS[4], ARGV[i]) or ''
end
return {revoked, exhausted, redis.call('GET', KEYS[3]) or '', limits}
