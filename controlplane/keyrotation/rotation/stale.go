package rotation

import "slices"

// ComparedKinds returns the kinds of keys that replicas compare to detect that they missed a
// rotation. A replica rejects signatures of a key of these kinds that it does not trust. The other
// kinds need no comparison: a replica with a different peer CA cannot connect to the other
// replicas, and a different encryption key affects only the replica's own disk.
func ComparedKinds() []Kind { return []Kind{ClusterCA, ServiceAccountKey} }

// AgreesWith reports whether two replicas trust each other's signing keys. It is false if the
// signing key of one of them is unknown.
func (h KeyIDs) AgreesWith(other KeyIDs) bool {
	return h.Signing != "" && other.Signing != "" && slices.Contains(h.Trusted, other.Signing) &&
		slices.Contains(other.Trusted, h.Signing)
}

// IsConfirmed reports whether own, the keys of a replica, agree with those of another replica. It
// also returns true if there is no other replica.
func IsConfirmed(own KeyIDs, others []Member) bool {
	return len(others) == 0 || slices.ContainsFunc(others, func(m Member) bool {
		return m.Problem == "" &&
			m.Keys.AgreesWith(own)
	})
}

// IsStale reports whether own, the keys of a replica, are stale because the key was rotated while
// the replica was away. A replica with stale keys must not serve. r is the record of the last
// rotation.
//
// Keys are stale if more replicas disagree with them than agree. In a tie, they are stale if r is
// after the step use and another replica signs with the new key of r. A replica that signs with the
// new key of such a record never has stale keys. Otherwise r is ignored, because a restored backup
// may contain it. Replicas that do not respond, or have no key of the kind, are not counted.
func IsStale(r Record, kind Kind, own KeyIDs, others []Member) bool {
	sameKind := r.Kind == kind
	if own.Signing == "" || sameKind && (r.Step == Trust || r.Step == Use) && r.AppliesTo(own.Signing) {
		// the replica will receive the new key
		return false
	}
	inUse := sameKind && slices.Contains([]Step{Wait, Serve, Forget, Done}, r.Step)
	if inUse && own.Signing == r.New {
		return false
	}
	agreeing, disagreeing, confirmedByRecord := 1, 0, false
	for _, m := range others {
		switch {
		case m.Problem != "" || m.Keys.Signing == "":
		case m.Keys.AgreesWith(own):
			agreeing++
		default:
			disagreeing++
			confirmedByRecord = confirmedByRecord || inUse && m.Keys.Signing == r.New
		}
	}
	return disagreeing > agreeing || disagreeing == agreeing && confirmedByRecord
}
