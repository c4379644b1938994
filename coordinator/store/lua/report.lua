-- Keep a verifier's telemetry, renew its lease and the placements of its live sessions, and tell what operators want.
-- KEYS: 1 verifier:<id> HASH, 2 placements:<id> ZSET, 3 fleet ZSET, 4 cordon:<id> STRING, 5 revoked ZSET, then
--       closed:<session> STRING and session:<session> HASH, a pair for each live session
-- ARGV: 1 verifier id, 2 instance, 3 lease ms, which placements last as well, 4 time of the last revocation that the
--       verifier knows, 5 most revocations in the reply, 6 number of telemetry fields and values, then those, then the
--       ids of all live sessions
-- Returns {1, whether this instance shall drain (0 or 1), {ids of sessions that their devices have closed}, {later
--       revocations with their times}, {tenant, weights hash, draft release, traffic class, and ids of the device for
--       trials of drafts and of stores of each session: '' what it was placed without}}, or {0} if the lease is lost or another instance holds it: the verifier has to
--       register again.
if redis.call('HGET', KEYS[1], 'instance') ~= ARGV[2] then
  return {0}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease_end = string.format('%.0f', now + tonumber(ARGV[3]))

local sessions_from = 7 + tonumber(ARGV[6])
for i = 7, sessions_from - 1, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], lease_end, ARGV[1])

local FACTS = {'tenant', 'weights', 'draft', 'traffic', 'device', 'store_device'}
local ended, facts = {}, {}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
for i = sessions_from, #ARGV do
  local at = 6 + 2 * (i - sessions_from)
  local closed = redis.call('GET', KEYS[at])
  if not closed then
    redis.call('ZADD', KEYS[2], lease_end, ARGV[i])
  else
    redis.call('ZREM', KEYS[2], ARGV[i])
    if closed ~= 'killed' then ended[#ended + 1] = ARGV[i] end
  end
  for _, value in ipairs(redis.call('HMGET', KEYS[at + 1], unpack(FACTS))) do
    facts[#facts + 1] = value or ''
  end
end
redis.call('PEXPIRE', KEYS[2], 86400000) -- so that a verifier that never returns leaves nothing
-- A time after the newest one's is of a store that has been lost: all are told again.
local newest = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')
local seen = newest[2] and tonumber(ARGV[4]) > tonumber(newest[2]) and '0' or ARGV[4]
local revoked = redis.call('ZRANGEBYSCORE', KEYS[5], '(' .. seen, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[5])
local drain = redis.call('GET', KEYS[4]) == ARGV[2]
redis.call('PEXPIRE', KEYS[4], 2592000000) -- a cordon is forgotten 30 days after its verifier
return {1, drain and 1 or 0, ended, revoked, facts}
