-- What a verifier reports about sessions; a zombie's figures never replace those of a greater epoch. The verdicts on a
-- session's guesses are added to those on the guesses of its kind: a report holds the last ones, of which those beyond
-- the number that was added are new (a guess that came late may put one in between: then a neighbour counts for it). Of a
-- session with more positions than a report holds only whole windows of them are added. Of one that has gone on for long
-- while nothing was kept of it, what it has shown by now may have been added already, and is not.
-- KEYS: stats:<session> HASH, closed:<session> STRING and prior:<kind> HASH, for each session
-- ARGV: 1 verifier id, 2 ms to keep them, 3 positions that a report's verdicts are of at most, 4 verdicts that are kept
--       of a kind, 5 ms to keep them, then 11 for each session: tenant, epoch (20 digits, so that text compares as
--       numbers do), steps, committed, evaluated, accepted, rtt ms, session id, verdicts (one digit each, the last one
--       the newest; '' where the session is of no kind), draft ms, nodes per level
local WINDOW, KEPT = tonumber(ARGV[3]), tonumber(ARGV[4])

-- What is known moves by 5 % at most with each report that brings verdicts: no stranger moves it far. 0 says nothing.
local function follow(known, said)
  known, said = tonumber(known or '0'), tonumber(said)
  if said <= 0 or known <= 0 then return string.format('%.9g', math.max(known, said)) end
  return string.format('%.9g', math.max(known / 1.05, math.min(known * 1.05, said)))
end

-- A kind that is hardly known, as where every request has a class of its own, is kept for a twenty-fourth of the time.
local function fold(key, fresh, draft_ms, per_level)
  local known = redis.call('HMGET', key, 'verdicts', 'draft_ms', 'nodes_per_level')
  local verdicts = string.sub((known[1] or '') .. fresh, -KEPT)
  redis.call('HSET', key, 'verdicts', verdicts,
    'draft_ms', follow(known[2], draft_ms), 'nodes_per_level', follow(known[3], per_level))
  redis.call('PEXPIRE', key, #verdicts < KEPT and math.floor(ARGV[5] / 24) or ARGV[5])
end

for i = 1, #KEYS, 3 do
  local key, prior = KEYS[i], KEYS[i + 2]
  local at = 6 + (i - 1) / 3 * 11
  local known = redis.call('HMGET', key, 'epoch', 'folded', 'window')
  local epoch = known[1]
  if redis.call('EXISTS', KEYS[i + 1]) == 0 and (not epoch or epoch <= ARGV[at + 1]) then
    local same = epoch == ARGV[at + 1]
    local folded = same and tonumber(known[2] or '0') or 0 -- verdicts of this window that were added
    local window = same and tonumber(known[3] or '0') or 0 -- the window's first position
    local committed, verdicts = tonumber(ARGV[at + 3]), ARGV[at + 8]
    if not epoch and committed > WINDOW then
      folded = #verdicts
    end
    if committed - window >= 2 * WINDOW then
      folded, window = 0, committed - WINDOW
    end
    if committed - window <= WINDOW and #verdicts > folded then
      fold(prior, string.sub(verdicts, folded + 1), ARGV[at + 9], ARGV[at + 10])
      folded = #verdicts
    end
    redis.call('HSET', key, 'verifier', ARGV[1], 'tenant', ARGV[at], 'epoch', ARGV[at + 1], 'steps', ARGV[at + 2],
      'committed', ARGV[at + 3], 'evaluated', ARGV[at + 4], 'accepted', ARGV[at + 5], 'rtt_ms', ARGV[at + 6],
      'session', ARGV[at + 7], 'folded', folded, 'window', string.format('%.0f', window))
    redis.call('PEXPIRE', key, ARGV[2])
  end
end
return #KEYS / 3
