package servicemodel

import (
	"cmp"
	"slices"
)

// frontendClaims maps each frontend to the claims of Ports (Service ports) to it, in order of
// precedence. Every user who can write Services may set any address as an external IP. Claims to a
// cluster IP therefore precede claims to external frontends. Among equal claims, the claim with the
// lowest Port ID precedes.
type frontendClaims map[Frontend][]frontendClaim

type frontendClaim struct {
	external bool
	id       string
}

func (c frontendClaim) compareClaims(d frontendClaim) int {
	class := func(c frontendClaim) int {
		if c.external {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(class(c), class(d)), cmp.Compare(c.id, d.id))
}

// updateClaims replaces the claims of old, the previous state of a Port, with the claims of
// current, its new state. Either may be nil. It adds to touched the IDs of other Ports that gain or
// lose a frontend.
func (c frontendClaims) updateClaims(old, current *Port, touched map[string]struct{}) {
	if old != nil && current != nil && slices.Equal(old.Internal, current.Internal) &&
		slices.Equal(old.External, current.External) {
		return
	}
	each := func(p *Port, do func(Frontend, frontendClaim)) {
		if p == nil {
			return
		}
		for _, f := range p.Internal {
			do(f, frontendClaim{false, p.ID})
		}
		for _, f := range p.External {
			do(f, frontendClaim{true, p.ID})
		}
	}
	each(old, func(f Frontend, by frontendClaim) {
		at, ok := slices.BinarySearchFunc(c[f], by, frontendClaim.compareClaims)
		if !ok {
			return
		}
		if c[f] = slices.Delete(c[f], at, at+1); len(c[f]) == 0 {
			delete(c, f)
		} else {
			touched[c[f][0].id] = struct{}{}
		}
	})
	each(current, func(f Frontend, by frontendClaim) {
		at, ok := slices.BinarySearchFunc(c[f], by, frontendClaim.compareClaims)
		if ok {
			return
		}
		if len(c[f]) > 0 {
			touched[c[f][0].id] = struct{}{}
		}
		c[f] = slices.Insert(c[f], at, by)
	})
}

// grantedPort returns a copy of the Port that has only the frontends at which the Port's claim has
// precedence. If this is true of all frontends, it returns p itself. It returns nil for nil.
func (c frontendClaims) grantedPort(p *Port) *Port {
	if p == nil {
		return nil
	}
	lost := func(external bool) func(Frontend) bool {
		return func(f Frontend) bool { return len(c[f]) == 0 || c[f][0] != frontendClaim{external, p.ID} }
	}
	if !slices.ContainsFunc(p.Internal, lost(false)) && !slices.ContainsFunc(p.External, lost(true)) {
		return p
	}
	out := *p
	out.Internal = slices.DeleteFunc(slices.Clone(p.Internal), lost(false))
	out.External = slices.DeleteFunc(slices.Clone(p.External), lost(true))
	out.Guarded = slices.DeleteFunc(slices.Clone(p.Guarded), lost(true))
	return &out
}
