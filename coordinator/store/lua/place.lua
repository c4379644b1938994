-- Place a session on a verifier, name a standby and use up a range of epochs for each, all in one step.
-- KEYS: 1 session:<id> HASH, 2 closed:<id> STRING, then for each candidate, in the order of the caller's random draw:
--       verifier:<id> HASH, placements:<id> ZSET, cordon:<id> STRING
-- ARGV: 1 session id, 2 tenant, 3 floor (greatest epoch that the caller knows), 4 epochs in a range, 5 ms for which the
--       place is kept before the device attaches, 6 session ms, 7 load weight ms, 8 target name ('' any),
--       9 weights hash ('' any), 10 tokenizer hash, 11 preferred numerics class ('' none), 12 draft release,
--       13 traffic class, and ids by which the device is drawn for trials 14 of drafts and 15 of stores ('' leaves what
--       is known of these four), then for each candidate: verifier id, rtt ms, failed (0/1)
-- Returns {first epoch of the primary, its id, its HGETALL, the standby's id ('' none), its HGETALL},
--      or {0, number of candidates that are alive and serve the target}: all of those are full, draining or cordoned,
--      or {0, -1} if an operator has killed the session, {0, -2} if its device has closed it.
local HEAD = 15
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)
local now_text = string.format('%.0f', now)
local FIELDS = {'capacity', 'live', 'draining', 'name', 'weights_hash', 'tokenizer_hash', 'class'}

local closed = redis.call('GET', KEYS[2])
if closed then return {0, closed == 'killed' and -1 or -2} end

local alive = 0

-- Return a candidate that may take the session, or nil. Occupancy is the number of placements, or what the verifier
-- reports if that is more.
local function inspect(i, name, weights, tokenizer)
  local record, placements, cordon = KEYS[3 * i], KEYS[3 * i + 1], KEYS[3 * i + 2]
  local v = redis.call('HMGET', record, unpack(FIELDS))
  if not v[1] then return nil end
  if (name ~= '' and v[4] ~= name) or (weights ~= '' and (v[5] ~= weights or v[6] ~= tokenizer)) then return nil end
  alive = alive + 1
  if v[3] == '1' then return nil end
  redis.call('ZREMRANGEBYSCORE', placements, '-inf', now_text)
  local used = math.max(redis.call('ZCARD', placements), tonumber(v[2] or '0'))
  local capacity = tonumber(v[1])
  local closed_to_new = used >= capacity or redis.call('EXISTS', cordon) == 1
  if closed_to_new and not redis.call('ZSCORE', placements, ARGV[1]) then return nil end
  local at = HEAD + 3 * (i - 1)
  return {
    i = i, id = ARGV[at + 1], failed = ARGV[at + 3] == '1',
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

local primary = choose(eligible(ARGV[8], ARGV[9], ARGV[10], 0), ARGV[11])
if not primary then return {0, alive} end
local standby = choose(eligible(primary.name, primary.weights, primary.tokenizer, primary.i), primary.class)

-- The epoch is greater than any given out before: by the record, by the clock if that was lost, by what the device saw.
local span = tonumber(ARGV[4])
local last = tonumber(redis.call('HGET', KEYS[1], 'epoch_last') or '0')
local epoch = math.max(micros, last + 1, tonumber(ARGV[3]) + 1)

local ends = string.format('%.0f', now + tonumber(ARGV[5]))
redis.call('ZADD', KEYS[3 * primary.i + 1], ends, ARGV[1])
redis.call('PEXPIRE', KEYS[3 * primary.i + 1], 86400000) -- so that a verifier that never returns leaves nothing
redis.call('HSET', KEYS[1], 'tenant', ARGV[2], 'verifier', primary.id, 'standby', standby and standby.id or '',
  'weights', primary.weights, 'epoch_last', string.format('%.0f', epoch + 2 * span - 1))
if ARGV[12] ~= '' then
  redis.call('HSET', KEYS[1], 'draft', ARGV[12], 'traffic', ARGV[13])
end
if ARGV[14] ~= '' or ARGV[15] ~= '' then
  redis.call('HSET', KEYS[1], 'device', ARGV[14], 'store_device', ARGV[15])
end
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[6]))

return {
  epoch, primary.id, redis.call('HGETALL', KEYS[3 * primary.i]),
  standby and standby.id or '', standby and redis.call('HGETALL', KEYS[3 * standby.i]) or {},
}
