package registry

import (
	"encoding/binary"
	"fmt"
	"math/big"
	"net/netip"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// The spaces of reservations.
const (
	SpaceClusterIPs = "clusterips"
	SpaceNodePorts  = "nodeports"
)

// reservationsOf is what an object must hold; nil is no object.
func (w *write) reservationsOf(obj api.Object) []api.Reservation {
	if obj == nil || w.req.Kind.Reservations == nil {
		return nil
	}
	return w.req.Kind.Reservations(obj)
}

// without returns the reservations of a whose place is not in b, each place once.
func without(a, b []api.Reservation) []api.Reservation {
	skip := make(map[string]bool, len(a)+len(b))
	for _, res := range b {
		skip[reservationKey(res)] = true
	}
	var out []api.Reservation
	for _, res := range a {
		if key := reservationKey(res); !skip[key] {
			skip[key] = true
			out = append(out, res)
		}
	}
	return out
}

// reservationOps takes what obj needs beyond old and releases what it no longer
// needs. Releasing needs no precondition: the commit requires old to be the stored state.
func (w *write) reservationOps(obj, old api.Object) []raftstore.Op {
	want, have := w.reservationsOf(obj), w.reservationsOf(old)
	var ops []raftstore.Op
	for _, res := range without(want, have) {
		ops = append(ops, raftstore.Create(reservationKey(res), []byte(w.fullKey())))
	}
	for _, res := range without(have, want) {
		if w.mayRelease(res) {
			ops = append(ops, raftstore.Delete(reservationKey(res)))
		}
	}
	return ops
}

// mayRelease says that a value is not held by another object. An object that was stored
// before values of its kind were reserved may have one that somebody else got since.
func (w *write) mayRelease(res api.Reservation) bool {
	holder, held := w.r.cache.reserved.Load().Get(res.Space + "/" + res.Value)
	return !held || holder == w.fullKey()
}

// reservationTaken is the refusal of a write whose reservation is held by another
// object. A value that admission had picked is no refusal: the conflict is
// returned, and admission picks again.
func (w *write) reservationTaken(conflict *raftstore.ConflictError, obj api.Object) error {
	if space, value, _ := strings.Cut(strings.TrimPrefix(conflict.Key, reservationsRoot), "/"); w.attempt.Picked(space, value) {
		return conflict
	}
	for _, res := range w.reservationsOf(obj) {
		if reservationKey(res) == conflict.Key {
			return w.takenError(res)
		}
	}
	return conflict
}

// takenError is Kubernetes' refusal of a value that another object holds.
func (w *write) takenError(res api.Reservation) error {
	detail := "provided IP is already allocated"
	value := res.Value
	if res.Space == SpaceNodePorts {
		detail = "provided port is already allocated"
		_, value, _ = strings.Cut(res.Value, "-")
	}
	return apierrors.NewInvalid(w.req.Kind.GVK.GroupKind(), w.req.Name,
		field.ErrorList{field.Invalid(fieldPath(res.Field), value, detail)})
}

// fieldPath carries a ready-made path such as "spec.ports[0].nodePort".
func fieldPath(s string) *field.Path { return field.NewPath(s) }

// checkReservations is for dry runs: would the reservations be had?
func (w *write) checkReservations(obj, old api.Object) error {
	held := w.r.cache.reserved.Load()
	for _, res := range without(w.reservationsOf(obj), w.reservationsOf(old)) {
		if _, taken := held.Get(res.Space + "/" + res.Value); taken {
			return w.takenError(res)
		}
	}
	return nil
}

// Reserved says whether a value is held by an object, as far as the cache knows.
func (r *Registry) Reserved(space, value string) bool {
	_, ok := r.cache.reserved.Load().Get(space + "/" + value)
	return ok
}

// AllocateClusterIP picks a free address of the range, at random, for the object of
// an attempt. When another write commits the same address first, the registry runs admission
// again. The lower end of the range is used last, so that people can pick fixed
// addresses there; the network address, the first address (that of the API) and an IPv4 broadcast
// address are never picked. A full range is a 500 that says so.
func (r *Registry) AllocateClusterIP(a *api.Attempt, cidr netip.Prefix) (netip.Addr, error) {
	cidr = cidr.Masked()
	hostBits := cidr.Addr().BitLen() - cidr.Bits()
	size := uint64(1) << min(hostBits, 62)
	last := size
	if cidr.Addr().Is4() && hostBits > 1 {
		last = size - 1 // broadcast
	}
	n, ok := r.pick(2, last, min(max(size/16, 16), 256), func(n uint64) bool {
		ip := addrAt(cidr, n).String()
		return !r.Reserved(SpaceClusterIPs, ip) && !a.Picked(SpaceClusterIPs, ip)
	})
	if !ok {
		return netip.Addr{}, apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: range is full (%s)", cidr))
	}
	addr := addrAt(cidr, n)
	a.Pick(SpaceClusterIPs, addr.String())
	return addr, nil
}

// AllocateNodePort picks a free port of [low, high] that is free for all the
// protocols ("TCP", "UDP", "SCTP"), under the terms of AllocateClusterIP.
func (r *Registry) AllocateNodePort(a *api.Attempt, low, high int, protocols ...string) (int32, error) {
	size := uint64(high - low + 1)
	n, ok := r.pick(uint64(low), uint64(high)+1, min(max(size/32, 16), 128), func(n uint64) bool {
		for _, p := range protocols {
			if r.Reserved(SpaceNodePorts, portValue(p, n)) || a.Picked(SpaceNodePorts, portValue(p, n)) {
				return false
			}
		}
		return true
	})
	if !ok {
		return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: range is full (%d-%d)", low, high))
	}
	for _, p := range protocols {
		a.Pick(SpaceNodePorts, portValue(p, n))
	}
	return int32(n), nil
}

func portValue(protocol string, port uint64) string {
	return protocol + "-" + strconv.FormatUint(port, 10)
}

// pick chooses a free number of [from, to): at random above the band that is
// kept for fixed choices, and inside the band only when the rest is full.
func (r *Registry) pick(from, to, band uint64, free func(uint64) bool) (uint64, bool) {
	if from >= to {
		return 0, false
	}
	split := min(from+band, to)
	if n, ok := r.pickIn(split, to, free); ok {
		return n, true
	}
	return r.pickIn(from, split, free)
}

// maxProbe bounds the search of a range; beyond it (an IPv6 /64) random draws have long found something.
const maxProbe = 1 << 20

func (r *Registry) pickIn(from, to uint64, free func(uint64) bool) (uint64, bool) {
	if from >= to {
		return 0, false
	}
	size := to - from
	for range 8 {
		if n := from + r.randomN(size); free(n) {
			return n, true
		}
	}
	start := r.randomN(size)
	for i := range min(size, maxProbe) {
		if n := from + (start+i)%size; free(n) {
			return n, true
		}
	}
	return 0, false
}

// addrAt is the n-th address of a prefix.
func addrAt(p netip.Prefix, n uint64) netip.Addr {
	if p.Addr().Is4() {
		b := p.Addr().As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := p.Addr().As16()
	sum := new(big.Int).Add(new(big.Int).SetBytes(b[:]), new(big.Int).SetUint64(n))
	sum.FillBytes(b[:])
	return netip.AddrFrom16(b)
}
