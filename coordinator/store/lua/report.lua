-- Keep a verifier's telemetry, renew its lease and the placements of its live sessions, count what tenants have had
-- generated, and tell what operators want.
-- KEYS: 1 verifier:<id> HASH, 2 placements:<id> ZSET, 3 fleet ZSET, 4 cordon:<id> STRING, 5 revoked ZSET,
--       6 tenant-limits HASH, 7 exhausted ZSET, 8 counted:<id> STRING, then tenant-use:<tenant> HASH and
--       tenant-places:<tenant> ZSET, a pair for each tenant, then closed:<session> STRING and session:<session> HASH, a
--       pair for each live session. Beside these: waiting:<weights> ZSET of its target
-- ARGV: 1 verifier id, 2 instance, 3 lease ms, which placements last as well, 4 time of the last revocation that the
--       verifier knows, 5 most revocations in the reply, 6 ms to keep the record of a session, 7 opens and 8 tokens per
--       minute of tenants for whom the operator has set nothing else (0 no limit), 9 ms to keep what a tenant uses,
--       10 number of tenants, 11 number of telemetry fields and values, 12 beginning of the key waiting,
--       13 number of the batch of tokens, then these fields and values, then name and tokens of each tenant, then of each live session its id and the number
--       of its tenant among these (0 none)
-- Returns {1, whether this instance shall drain (0 or 1), {ids of sessions that their devices have closed}, {later
--       revocations with their times}, {tenant, weights hash, draft release, traffic class, and ids of the device
--       for trials of drafts and of stores of each session: '' what it was placed without}, the time (ms), whether a tenant waits for a place at the target (0 or 1),
--       {tenants whose tokens are used up}}, or {0} if the lease is lost or another instance holds it: the verifier has to
--       register again.
local HEAD, KEYS_BEFORE, MOST_EXHAUSTED = 13, 8, 256
local MOST_MINUTES = 61 -- of its limit that a tenant's tokens count at most: it is never kept out for over an hour
local known = redis.call('HMGET', KEYS[1], 'instance', 'weights_hash')
if known[1] ~= ARGV[2] then
  return {0}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_text = string.format('%.0f', now)
local lease_end = string.format('%.0f', now + tonumber(ARGV[3]))
local tenants, fields = tonumber(ARGV[10]), tonumber(ARGV[11])

for i = HEAD + 1, HEAD + fields, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('ZADD', KEYS[3], lease_end, ARGV[1])

-- Return the part of an amount that still counts after some minutes: with a limit, the limit is taken off in a minute.
local function remaining(amount, minutes, limit)
  amount = tonumber(amount or '0')
  return limit > 0 and math.max(0, amount - minutes * limit) or amount * math.exp(-minutes)
end

local function count_tokens(tenant, key, generated)
  local own = redis.call('HGET', KEYS[6], tenant) or ''
  local of_opens, of_tokens = string.match(own, '^%S+ (%S+) (%S+)')
  local opens_limit, limit = tonumber(of_opens) or tonumber(ARGV[7]), tonumber(of_tokens) or tonumber(ARGV[8])
  local known = redis.call('HMGET', key, 'opens', 'tokens', 'at')
  local minutes = math.max(0, now - tonumber(known[3] or now)) / 60000
  local tokens = remaining(known[2], minutes, limit) + generated
  if limit > 0 then tokens = math.min(tokens, MOST_MINUTES * limit) end
  if limit > 0 and tokens >= limit then
    redis.call('ZADD', KEYS[7], string.format('%.0f', now + (tokens - limit + 1) * 60000 / limit), tenant)
  else
    redis.call('ZREM', KEYS[7], tenant)
  end
  redis.call('HSET', key, 'opens', remaining(known[1], minutes, opens_limit), 'tokens', tokens, 'at', now_text)
  redis.call('PEXPIRE', key, ARGV[9])
end

-- The tokens of a report whose answer was lost come again, with the same number. 0: the verifier numbers none.
local instance, counted = string.match(redis.call('GET', KEYS[8]) or '', '^(%d+) (%d+)$')
local sequence = tonumber(ARGV[13])
local fresh = sequence == 0 or instance ~= ARGV[2] or sequence > tonumber(counted)
if fresh and sequence > 0 then
  redis.call('SET', KEYS[8], ARGV[2] .. ' ' .. ARGV[13], 'PX', ARGV[9])
end

local tenants_from = HEAD + fields
for i = 1, tenants do
  local generated = fresh and tonumber(ARGV[tenants_from + 2 * i]) or 0
  if generated > 0 then
    count_tokens(ARGV[tenants_from + 2 * i - 1], KEYS[KEYS_BEFORE + 2 * i - 1], generated)
  end
end

local FACTS = {'tenant', 'weights', 'draft', 'traffic', 'device', 'store_device'}
local ended, facts = {}, {}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_text)
local sessions_from, keys_from = tenants_from + 2 * tenants, KEYS_BEFORE + 2 * tenants
for i = 1, (#ARGV - sessions_from) / 2 do
  local id, of = ARGV[sessions_from + 2 * i - 1], tonumber(ARGV[sessions_from + 2 * i])
  local closed_key, record = KEYS[keys_from + 2 * i - 1], KEYS[keys_from + 2 * i]
  local closed = redis.call('GET', closed_key)
  if not closed then
    redis.call('ZADD', KEYS[2], lease_end, id)
    redis.call('HSET', record, 'live', now_text)
    redis.call('PEXPIRE', record, ARGV[6])
    if of > 0 then
      redis.call('HSETNX', record, 'tenant', ARGV[tenants_from + 2 * of - 1])
      redis.call('ZADD', KEYS[KEYS_BEFORE + 2 * of], lease_end, id)
    end
  else
    redis.call('ZREM', KEYS[2], id)
    if closed ~= 'killed' then ended[#ended + 1] = id end
  end
  for _, value in ipairs(redis.call('HMGET', record, unpack(FACTS))) do
    facts[#facts + 1] = value or ''
  end
end
redis.call('PEXPIRE', KEYS[2], 86400000) -- so that a verifier that never returns leaves nothing
for i = 1, tenants do
  local places = KEYS[KEYS_BEFORE + 2 * i]
  redis.call('ZREMRANGEBYSCORE', places, '-inf', now_text)
  redis.call('PEXPIRE', places, 86400000)
end
-- A time after the newest one's is of a store that has been lost: all are told again.
local newest = redis.call('ZRANGE', KEYS[5], -1, -1, 'WITHSCORES')
local seen = newest[2] and tonumber(ARGV[4]) > tonumber(newest[2]) and '0' or ARGV[4]
local revoked = redis.call('ZRANGEBYSCORE', KEYS[5], '(' .. seen, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[5])
local drain = redis.call('GET', KEYS[4]) == ARGV[2]
redis.call('PEXPIRE', KEYS[4], 2592000000) -- a cordon is forgotten 30 days after its verifier
redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now_text)
redis.call('PEXPIRE', KEYS[7], ARGV[9])
local exhausted = redis.call('ZRANGE', KEYS[7], 0, MOST_EXHAUSTED - 1)
local waited = redis.call('ZCOUNT', ARGV[12] .. (known[2] or ''), now_text, '+inf') > 0
return {1, drain and 1 or 0, ended, revoked, facts, now_text, waited and 1 or 0, exhausted}
