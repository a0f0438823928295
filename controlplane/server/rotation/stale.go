package rotation

import "slices"

// Vital are the kinds of which a replica has to have what the others have: what it signs by another key they refuse, and it
// refuses what they sign. No verb exchanges them by hand. Without the replicas' authority there is no replica to be asked,
// and under its own encryption key a replica seals nothing but its own disk.
func Vital() []Kind { return []Kind{ClusterCA, ServiceAccountKey} }

// Agrees says whether two replicas each believe what the other one signs.
func (h Held) Agrees(other Held) bool {
	return h.Signs != "" && other.Signs != "" && slices.Contains(h.Believes, other.Signs) && slices.Contains(other.Believes, h.Signs)
}

// Confirmed says whether one that is not Stale is known to be well: somebody else has the same, or there is nobody else. Where
// those who would say so do not answer, it is as it was.
func Confirmed(mine Held, others []Member) bool {
	return len(others) == 0 || slices.ContainsFunc(others, func(m Member) bool { return m.Problem == "" && m.Held.Agrees(mine) })
}

// Stale says whether a replica must not serve by what it has: it was away while the key was exchanged. It is in the minority
// with it, or the record of an exchange that is past its use breaks the tie; one that signs as that record says is never
// stale. What the record says counts for nothing where nobody has such a key: a backup may have brought it from another time.
// Who does not answer, or has nothing of the kind, counts on neither side.
func Stale(r Record, kind Kind, mine Held, others []Member) bool {
	of := r.Kind == kind
	if mine.Signs == "" || of && (r.Step == Trust || r.Step == Use) && r.Concerns(mine.Signs) { // it takes the new key from the record
		return false
	}
	settled := of && slices.Contains([]Step{Wait, Serve, Forget, Done}, r.Step)
	if settled && mine.Signs == r.New {
		return false
	}
	with, against, recorded := 1, 0, false
	for _, m := range others {
		switch {
		case m.Problem != "" || m.Held.Signs == "":
		case m.Held.Agrees(mine):
			with++
		default:
			against++
			recorded = recorded || settled && m.Held.Signs == r.New
		}
	}
	return against > with || against == with && recorded
}
