-- Place a session on a verifier, name a standby and use up a range of epochs for each, all in one step.
-- KEYS: 1 session:<id> HASH, 2 waiting ZSET, 3 tenant-places:<tenant> ZSET, then those of other tenants that wait, then
--       for each candidate, in the caller's order (placement.py):
--       verifier:<id> HASH, placements:<id> ZSET, cordon:<id> STRING
-- ARGV: 1 session id, 2 tenant, 3 floor (greatest epoch that the caller knows), 4 epochs in a range, 5 ms for which the
--       place is kept before the device attaches, 6 ms for which the session's record is kept before, 7 candidates that
--       are compared, 8 target name, 9 weights hash and 10 tokenizer hash that are wanted ('' any), 11 draft release and
--       12 traffic class ('' leaves what is known of them), 13 whether the tenant shares places with others (0/1), 14 its
--       limit of places (0 none), 15 ms after its last report in which a session is running (0 where it is taken for a
--       new one), 16 whether these are the last candidates (0/1), 17 ms for which who gets no place is taken to wait, 18
--       id by which the device is drawn for trials of drafts ('' leaves what is known of it), 19 number of tenants that
--       wait, then these, then for each candidate: verifier id, whether it has failed the session (0/1)
-- Returns {first epoch of the primary, its id, its HGETALL, the standby's id ('' none), its HGETALL, end of the place (ms)},
--      or {0, number of candidates that are alive and serve the target}: all of those are full, draining or cordoned,
--      or {0, -1} if an operator has killed the session, {0, -2} if its device has closed it,
--      or {0, -3, limit that is reached: places or share, its value, ms after which to ask again}.
local ASK_MS, waiters = 1000, tonumber(ARGV[19])
local HEAD, EACH, KEYS_BEFORE = 19 + waiters, 2, 3 + waiters
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)
local now_text = string.format('%.0f', now)
local FIELDS = {'capacity', 'live', 'draining', 'name', 'weights_hash', 'tokenizer_hash'}

local known = redis.call('HMGET', KEYS[1], 'closed', 'live', 'epoch_last')
if known[1] then return {0, known[1] == 'killed' and -1 or -2} end

local tenant, shares, places = ARGV[2], ARGV[13] == '1', 0
local reported = tonumber(known[2] or '0')
local running = reported > 0 and now - reported < tonumber(ARGV[15]) -- it may move whatever its tenant has generated

local function refusal(which, value)
  return {0, -3, which, value, ASK_MS}
end

if shares then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_text)
  places = redis.call('ZCARD', KEYS[3]) - (redis.call('ZSCORE', KEYS[3], ARGV[1]) and 1 or 0)
  local limit = tonumber(ARGV[14])
  if limit > 0 and places >= limit then return refusal('places', limit) end
end

local alive = 0

-- Return a candidate that may take the session, or nil. Occupancy is the number of placements, or what the verifier
-- reports if that is more.
local function inspect(i)
  local key = KEYS_BEFORE + 3 * (i - 1)
  local record, placements, cordon = KEYS[key + 1], KEYS[key + 2], KEYS[key + 3]
  local v = redis.call('HMGET', record, unpack(FIELDS))
  if not v[1] then return nil end
  for part, wanted in ipairs({ARGV[8], ARGV[9], ARGV[10]}) do
    if wanted ~= '' and v[3 + part] ~= wanted then return nil end
  end
  alive = alive + 1
  if v[3] == '1' then return nil end
  redis.call('ZREMRANGEBYSCORE', placements, '-inf', now_text)
  local used = math.max(redis.call('ZCARD', placements), tonumber(v[2] or '0'))
  local capacity = tonumber(v[1])
  local closed_to_new = used >= capacity or redis.call('EXISTS', cordon) == 1
  if closed_to_new and not redis.call('ZSCORE', placements, ARGV[1]) then return nil end
  local at = HEAD + EACH * (i - 1)
  return {
    key = key, i = i, id = ARGV[at + 1], failed = ARGV[at + 2] == '1', load = used / capacity, name = v[4], weights = v[5], tokenizer = v[6],
  }
end

-- Return the least loaded of the first candidates ("power of two choices") among those that have not failed the session,
-- or among the others if there are none.
local function choose(found)
  local best, compared
  for _, c in ipairs(found) do
    if not best or (best.failed and not c.failed) then
      best, compared = c, 1
    elseif c.failed == best.failed and compared < tonumber(ARGV[7]) then
      compared = compared + 1
      if c.load < best.load then best = c end
    end
  end
  return best
end

-- Return those of the candidates found that may take the session over from another one.
local function others(found, primary)
  local left = {}
  for _, c in ipairs(found) do
    local same = c.name == primary.name and c.weights == primary.weights and c.tokenizer == primary.tokenizer
    if c.i ~= primary.i and same then left[#left + 1] = c end
  end
  return left
end

-- Return whether a tenant with fewer places waits for one at this target: it gets the next (max-min fairness: of those
-- who want more, the one with the least goes first).
local function fewer_wait()
  for i = 1, waiters do
    local waits_until = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[19 + i]) or '0')
    if waits_until > now and redis.call('ZCOUNT', KEYS[3 + i], now_text, '+inf') < places then return true end
  end
  return false
end

local function wait()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_text)
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[17])), tenant)
  redis.call('PEXPIRE', KEYS[2], ARGV[17])
end

local found = {}
for i = 1, (#ARGV - HEAD) / EACH do
  found[#found + 1] = inspect(i)
end
local primary = choose(found)
if not primary then
  if shares and alive > 0 and ARGV[16] == '1' then wait() end
  return {0, alive}
end
if shares and not running and fewer_wait() then
  wait()
  return refusal('share', places)
end
local standby = choose(others(found, primary))

-- The epoch is greater than any given out before: by the record, by the clock if that was lost, by what the device saw.
local span = tonumber(ARGV[4])
local epoch = math.max(micros, tonumber(known[3] or '0') + 1, tonumber(ARGV[3]) + 1)

local ends = string.format('%.0f', now + tonumber(ARGV[5]))
redis.call('ZADD', KEYS[primary.key + 2], ends, ARGV[1])
redis.call('PEXPIRE', KEYS[primary.key + 2], 86400000) -- so that a verifier that never returns leaves nothing
redis.call('HSET', KEYS[1], 'tenant', tenant, 'verifier', primary.id, 'standby', standby and standby.id or '',
  'weights', primary.weights, 'epoch_last', string.format('%.0f', epoch + 2 * span - 1))
if ARGV[11] ~= '' then
  redis.call('HSET', KEYS[1], 'draft', ARGV[11], 'traffic', ARGV[12])
end
if ARGV[18] ~= '' then
  redis.call('HSET', KEYS[1], 'device', ARGV[18])
end
if reported > 0 then redis.call('HINCRBY', KEYS[1], 'moves', 1) end
if reported == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[6]) -- reports prolong it
end
if shares then
  redis.call('ZADD', KEYS[3], ends, ARGV[1])
  redis.call('PEXPIRE', KEYS[3], 86400000)
end
return {
  epoch, primary.id, redis.call('HGETALL', KEYS[primary.key + 1]),
  standby and standby.id or '', standby and redis.call('HGETALL', KEYS[standby.key + 1]) or {}, ends,
}
