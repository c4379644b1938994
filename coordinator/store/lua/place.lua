-- Place a session on a verifier, name a standby and use up a range of epochs for each, all in one step.
-- KEYS: 1 session:<id> HASH, 2 closed:<id> STRING, 3 tenant-limits HASH, 4 tenant-use:<tenant> HASH,
--       5 tenant-places:<tenant> ZSET, then for each candidate, in the order of the caller's random draw:
--       verifier:<id> HASH, placements:<id> ZSET, cordon:<id> STRING.
--       Beside these: waiting:<weights> ZSET of the candidates' targets, tenant-places:<tenant> ZSET of who waits there
-- ARGV: 1 session id, 2 tenant, 3 floor (greatest epoch that the caller knows), 4 epochs in a range, 5 ms for which the
--       place is kept before the device attaches, 6 ms for which the session's record is kept before, 7 load weight ms,
--       8 target name ('' any), 9 weights hash ('' any), 10 tokenizer hash, 11 preferred numerics class ('' none),
--       12 draft release and 13 traffic class ('' leaves what is known of them), 14 whether the tenant has limits (0/1),
--       15 to 18 the limits where the operator has set none: places, opens per minute, tokens per minute, streams at a
--       verifier (0 none), 19 ms to keep what it uses, 20 ms after its last report in which a session is running,
--       21 whether these are the last candidates (0/1), 22 ms for which who gets no place is taken to wait, 23 and 24 the
--       beginnings of the keys tenant-places and waiting, ids by which the device is drawn for trials 25 of drafts and
--       26 of stores ('' leaves what is known of them), then for each candidate: verifier id, rtt ms, failed (0/1)
-- Returns {first epoch of the primary, its id, its HGETALL, the standby's id ('' none), its HGETALL, limit of streams (no
--       more than of places), end of the place (ms)},
--      or {0, number of candidates that are alive and serve the target}: all of those are full, draining or cordoned,
--      or {0, -1} if an operator has killed the session, {0, -2} if its device has closed it,
--      or {0, -3, limit that is reached: tokens, opens, places or share, its value, ms after which to ask again}.
local HEAD, KEYS_BEFORE, MOST_WAITING, ASK_MS = 26, 5, 64, 1000
local PLACES, OPENS, TOKENS, STREAMS = 1, 2, 3, 4
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)
local now_text = string.format('%.0f', now)
local FIELDS = {'capacity', 'live', 'draining', 'name', 'weights_hash', 'tokenizer_hash', 'class'}

local closed = redis.call('GET', KEYS[2])
if closed then return {0, closed == 'killed' and -1 or -2} end

local tenant, has_limits = ARGV[2], ARGV[14] == '1'
local limits, opens, places = {0, 0, 0, 0}, 0, 0
local reported = tonumber(redis.call('HGET', KEYS[1], 'live') or '0')
local running = reported > 0 and now - reported < tonumber(ARGV[20]) -- it may move whatever its tenant has used

-- Return the part of an amount that still counts after some minutes: with a limit, the limit is taken off in a minute.
local function remaining(amount, minutes, limit)
  amount = tonumber(amount or '0')
  return limit > 0 and math.max(0, amount - minutes * limit) or amount * math.exp(-minutes)
end

local function refusal(which, limit, ms)
  return {0, -3, which, limit, math.ceil(ms)}
end

if has_limits then
  local i = 0
  for own in string.gmatch(redis.call('HGET', KEYS[3], tenant) or '- - - -', '%S+') do
    i = i + 1
    limits[i] = tonumber(own) or tonumber(ARGV[14 + i])
  end
  local known = redis.call('HMGET', KEYS[4], 'opens', 'tokens', 'at')
  local minutes = math.max(0, now - tonumber(known[3] or now)) / 60000
  opens = remaining(known[1], minutes, limits[OPENS])
  local tokens = remaining(known[2], minutes, limits[TOKENS])
  redis.call('HSET', KEYS[4], 'opens', opens, 'tokens', tokens, 'at', now_text)
  redis.call('PEXPIRE', KEYS[4], ARGV[19])
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now_text)
  places = redis.call('ZCARD', KEYS[5]) - (redis.call('ZSCORE', KEYS[5], ARGV[1]) and 1 or 0)
  if not running then
    if limits[TOKENS] > 0 and tokens >= limits[TOKENS] then
      return refusal('tokens', limits[TOKENS], (tokens - limits[TOKENS] + 1) * 60000 / limits[TOKENS])
    end
    if limits[OPENS] > 0 and opens + 1 > limits[OPENS] then
      return refusal('opens', limits[OPENS], (opens + 1 - limits[OPENS]) * 60000 / limits[OPENS])
    end
    if limits[PLACES] > 0 and places >= limits[PLACES] then
      return refusal('places', limits[PLACES], ASK_MS)
    end
  end
end

local alive, targets = 0, {}

-- Return a candidate that may take the session, or nil. Occupancy is the number of placements, or what the verifier
-- reports if that is more.
local function inspect(i, name, weights, tokenizer)
  local key = KEYS_BEFORE + 3 * (i - 1)
  local record, placements, cordon = KEYS[key + 1], KEYS[key + 2], KEYS[key + 3]
  local v = redis.call('HMGET', record, unpack(FIELDS))
  if not v[1] then return nil end
  if (name ~= '' and v[4] ~= name) or (weights ~= '' and (v[5] ~= weights or v[6] ~= tokenizer)) then return nil end
  alive = alive + 1
  targets[v[5]] = true
  if v[3] == '1' then return nil end
  redis.call('ZREMRANGEBYSCORE', placements, '-inf', now_text)
  local used = math.max(redis.call('ZCARD', placements), tonumber(v[2] or '0'))
  local capacity = tonumber(v[1])
  local closed_to_new = used >= capacity or redis.call('EXISTS', cordon) == 1
  if closed_to_new and not redis.call('ZSCORE', placements, ARGV[1]) then return nil end
  local at = HEAD + 3 * (i - 1)
  return {
    key = key, i = i, id = ARGV[at + 1], failed = ARGV[at + 3] == '1',
    cost = tonumber(ARGV[at + 2]) + tonumber(ARGV[7]) * used / capacity,
    name = v[4], weights = v[5], tokenizer = v[6], class = v[7],
  }
end

-- Return 0 for the best tier: a candidate that has not failed the session, in the preferred numerics class.
local function tier(c, class)
  return (c.failed and 2 or 0) + ((class ~= '' and c.class ~= class) and 1 or 0)
end

-- Return the better of the first two candidates of the best tier that has any ("power of two choices").
local function choose(found, class)
  local best, second
  for _, c in ipairs(found) do
    if not best or tier(c, class) < tier(best, class) then
      best, second = c, nil
    elseif not second and tier(c, class) == tier(best, class) then
      second = c
    end
  end
  if second and second.cost < best.cost then return second end
  return best
end

local function eligible(name, weights, tokenizer, except)
  local found = {}
  for i = 1, (#ARGV - HEAD) / 3 do
    local c = i ~= except and inspect(i, name, weights, tokenizer) or nil
    if c then found[#found + 1] = c end
  end
  return found
end

-- Return whether a tenant with fewer places waits for one of this target: it gets the next (max-min fairness: of those
-- who want more, the one with the least goes first). Of many who wait, those who asked last are looked at.
local function fewer_wait(weights)
  local waiting = redis.call('ZREVRANGEBYSCORE', ARGV[24] .. weights, '+inf', now_text, 'LIMIT', 0, MOST_WAITING)
  for _, other in ipairs(waiting) do
    if other ~= tenant and redis.call('ZCOUNT', ARGV[23] .. other, now_text, '+inf') < places then return true end
  end
  return false
end

local function wait_for(weights)
  local key = ARGV[24] .. weights
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_text)
  redis.call('ZADD', key, string.format('%.0f', now + tonumber(ARGV[22])), tenant)
  redis.call('PEXPIRE', key, ARGV[22])
end

local primary = choose(eligible(ARGV[8], ARGV[9], ARGV[10], 0), ARGV[11])
if not primary then
  if has_limits and ARGV[21] == '1' then
    for weights in pairs(targets) do wait_for(weights) end
  end
  return {0, alive}
end
if has_limits and not running and fewer_wait(primary.weights) then
  wait_for(primary.weights)
  return refusal('share', places, ASK_MS)
end
local standby = choose(eligible(primary.name, primary.weights, primary.tokenizer, primary.i), primary.class)

-- The epoch is greater than any given out before: by the record, by the clock if that was lost, by what the device saw.
local span = tonumber(ARGV[4])
local last = tonumber(redis.call('HGET', KEYS[1], 'epoch_last') or '0')
local epoch = math.max(micros, last + 1, tonumber(ARGV[3]) + 1)

local ends = string.format('%.0f', now + tonumber(ARGV[5]))
redis.call('ZADD', KEYS[primary.key + 2], ends, ARGV[1])
redis.call('PEXPIRE', KEYS[primary.key + 2], 86400000) -- so that a verifier that never returns leaves nothing
redis.call('HSET', KEYS[1], 'tenant', tenant, 'verifier', primary.id, 'standby', standby and standby.id or '',
  'weights', primary.weights, 'epoch_last', string.format('%.0f', epoch + 2 * span - 1))
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], 'draft', ARGV[12], 'traffic', ARGV[13])
end
if reported == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[6]) -- reports prolong it
end
if has_limits then
  redis.call('ZADD', KEYS[5], ends, ARGV[1])
  redis.call('PEXPIRE', KEYS[5], 86400000)
  if not running then redis.call('HSET', KEYS[4], 'opens', opens + 1) end
end
if ARGV[25] ~= '' or ARGV[26] ~= '' then
  redis.call('HSET', KEYS[1], 'device', ARGV[25], 'store_device', ARGV[26])
end

local streams = limits[STREAMS]
if limits[PLACES] > 0 and (streams == 0 or limits[PLACES] < streams) then
  streams = limits[PLACES]
end
return {
  epoch, primary.id, redis.call('HGETALL', KEYS[primary.key + 1]),
  standby and standby.id or '', standby and redis.call('HGETALL', KEYS[standby.key + 1]) or {}, streams, ends,
}
