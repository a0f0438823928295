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

// reservationsOf returns the reservations that an object requires; none for nil.
func (w *write) reservationsOf(obj api.Object) []api.Reservation {
	if obj == nil || w.req.Kind.Reservations == nil {
		return nil
	}
	return w.req.Kind.Reservations(obj)
}

// without returns the reservations in a that are not in b, without duplicates.
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

// reservationOps creates the reservations of obj that old does not have, and deletes those of old
// that obj does not have. The deletions need no precondition: the commit requires old to be the
// stored state.
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

// mayRelease reports whether a reservation is not held by another object. An object that was stored
// before its kind had reservations may contain a value that another object has reserved since.
func (w *write) mayRelease(res api.Reservation) bool {
	holder, held := w.r.cache.reserved.Load().Get(res.Space + "/" + res.Value)
	return !held || holder == w.fullKey()
}

// reservationTaken returns the error of a write with a reservation that another object holds. If
// admission had picked the value, it returns the conflict, so that admission picks another one.
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

// takenError returns Kubernetes' error for a value that another object holds.
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

// fieldPath returns a complete path, such as "spec.ports[0].nodePort", as a *field.Path.
func fieldPath(s string) *field.Path { return field.NewPath(s) }

// checkReservations returns the error that the reservations would cause. It is used for dry runs.
func (w *write) checkReservations(obj, old api.Object) error {
	held := w.r.cache.reserved.Load()
	for _, res := range without(w.reservationsOf(obj), w.reservationsOf(old)) {
		if _, taken := held.Get(res.Space + "/" + res.Value); taken {
			return w.takenError(res)
		}
	}
	return nil
}

// Reserved reports whether an object holds a value, by the state of the cache.
func (r *Registry) Reserved(space, value string) bool {
	_, ok := r.cache.reserved.Load().Get(space + "/" + value)
	return ok
}

// AllocateClusterIP picks a random free address of the range for the object of an attempt. If
// another write commits the same address first, the registry runs admission again. The lower end of
// the range is used last, so that users can choose fixed addresses there. The network address, the
// first address (the API's) and an IPv4 broadcast address are never picked. If the range is full,
// it returns a 500.
func (r *Registry) AllocateClusterIP(a *api.Attempt, cidr netip.Prefix) (netip.Addr, error) {
	cidr = cidr.Masked()
	hostBits := cidr.Addr().BitLen() - cidr.Bits()
	size := uint64(1) << min(hostBits, 62)
	last := size
	if cidr.Addr().Is4() && hostBits > 1 {
		last = size - 1 // exclude the broadcast address
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

// AllocateNodePort picks a port in [low, high] that is free for all the protocols ("TCP", "UDP",
// "SCTP"), by the same rules as AllocateClusterIP.
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

// pick returns a free number in [from, to). It picks at random above the lower band, which is
// intended for fixed choices, and within the band only if the rest is full.
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

// maxProbe bounds the search. In a larger range (an IPv6 /64), random picks find a free number
// first.
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

// addrAt returns the n-th address of a prefix.
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
