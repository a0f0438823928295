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
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// The spaces (namespaces) of reserved values. A value can be reserved once in each space.
const (
	SpaceClusterIPs = "clusterips"
	SpaceNodePorts  = "nodeports"
)

// reserver computes the store operations that reserve the unique values of a written object, such
// as cluster IPs and node ports. It also returns the errors for values that another object has
// reserved.
type reserver struct{ w *write }

func (w *write) newReserver() reserver { return reserver{w} }

// reservationsOf returns the values that must be reserved for an object, such as its cluster IPs.
// It returns nil if obj is nil.
func (v reserver) reservationsOf(obj api.Object) []api.Reservation {
	if obj == nil || v.w.req.Kind.Commit.Reservations == nil {
		return nil
	}
	return v.w.req.Kind.Commit.Reservations(obj)
}

// subtractReservations returns the reservations that are not in excluded, without duplicates.
func subtractReservations(reservations, excluded []api.Reservation) []api.Reservation {
	skip := make(map[string]bool, len(reservations)+len(excluded))
	for _, res := range excluded {
		skip[storedform.ReservationKey(res)] = true
	}
	var out []api.Reservation
	for _, res := range reservations {
		if key := storedform.ReservationKey(res); !skip[key] {
			skip[key] = true
			out = append(out, res)
		}
	}
	return out
}

// reservationOps returns the store operations that replace the reserved values of the stored object
// with those of obj. Both objects may be nil. The operations create missing reservations and delete
// those that obj does not need. The deletions need no precondition: the commit requires that the
// stored object has not changed.
func (v reserver) reservationOps(obj, stored api.Object) []raftstore.Op {
	required, existing := v.reservationsOf(obj), v.reservationsOf(stored)
	var ops []raftstore.Op
	for _, res := range subtractReservations(required, existing) {
		ops = append(ops, raftstore.Create(storedform.ReservationKey(res), []byte(v.w.fullKey())))
	}
	for _, res := range subtractReservations(existing, required) {
		if v.mayRelease(res) {
			ops = append(ops, raftstore.Delete(storedform.ReservationKey(res)))
		}
	}
	return ops
}

// mayRelease reports whether the write may delete the reservation of a value of its object. It
// returns false if another object holds the reservation. This can happen for an object that was
// stored before values of its kind were reserved.
func (v reserver) mayRelease(res api.Reservation) bool {
	holder, held := v.w.registry.cache.Holder(res.Space, res.Value)
	return !held || holder == v.w.fullKey()
}

// conflictError returns the error of a write of obj if another object has reserved one of its
// values, such as a cluster IP. If admission has picked the value, it returns the conflict
// unchanged. The write is then retried, and admission picks another value.
func (v reserver) conflictError(conflict *raftstore.ConflictError, obj api.Object) error {
	if space, value, _ := strings.Cut(strings.TrimPrefix(conflict.Key, storedform.ReservationsRoot),
		"/"); v.w.attempt.IsPicked(space, value) {
		return conflict
	}
	for _, res := range v.reservationsOf(obj) {
		if storedform.ReservationKey(res) == conflict.Key {
			return v.takenError(res)
		}
	}
	return conflict
}

// takenError returns the error (422) that Kubernetes returns for an IP or port that another object
// has reserved.
func (v reserver) takenError(res api.Reservation) error {
	detail := "provided IP is already allocated"
	value := res.Value
	if res.Space == SpaceNodePorts {
		detail = "provided port is already allocated"
		_, value, _ = strings.Cut(res.Value, "-")
	}
	return apierrors.NewInvalid(v.w.req.Kind.GVK.GroupKind(), v.w.req.Name,
		field.ErrorList{field.Invalid(fieldPath(res.Field), value, detail)})
}

// fieldPath returns a complete path in text form, such as "spec.ports[0].nodePort", as a
// *field.Path.
func fieldPath(s string) *field.Path { return field.NewPath(s) }

// checkReservations returns an error if another object has reserved a value that obj requires and
// the stored object does not have. It is for dry runs, which reserve nothing.
func (v reserver) checkReservations(obj, stored api.Object) error {
	for _, res := range subtractReservations(v.reservationsOf(obj), v.reservationsOf(stored)) {
		if _, held := v.w.registry.cache.Holder(res.Space, res.Value); held {
			return v.takenError(res)
		}
	}
	return nil
}

// Reserved reports whether an object has reserved a value, such as a cluster IP, in a space
// (SpaceClusterIPs or SpaceNodePorts), according to the watch cache.
func (r *Registry) Reserved(space, value string) bool {
	_, ok := r.cache.Holder(space, value)
	return ok
}

// AllocateClusterIP returns a random free address of the prefix for the object of an attempt, and
// records it as picked. If another write commits the same address first, the registry runs
// admission again. The lower end of the prefix is used last, so that users can choose fixed
// addresses there. The network address, the first address (that of the API) and an IPv4 broadcast
// address are never picked. If all addresses are used, it returns a 500.
func (r *Registry) AllocateClusterIP(attempt *api.Attempt, prefix netip.Prefix) (netip.Addr, error) {
	prefix = prefix.Masked()
	hostBits := prefix.Addr().BitLen() - prefix.Bits()
	size := uint64(1) << min(hostBits, 62)
	last := size
	if prefix.Addr().Is4() && hostBits > 1 {
		last = size - 1 // exclude the broadcast address
	}
	n, ok := r.pickFree(2, last, min(max(size/16, 16), 256), func(n uint64) bool {
		ip := addrAt(prefix, n).String()
		return !r.Reserved(SpaceClusterIPs, ip) && !attempt.IsPicked(SpaceClusterIPs, ip)
	})
	if !ok {
		return netip.Addr{},
			apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: range is full (%s)", prefix))
	}
	addr := addrAt(prefix, n)
	attempt.RecordPick(SpaceClusterIPs, addr.String())
	return addr, nil
}

// AllocateNodePort returns a port in [low, high] that is free for all the protocols ("TCP", "UDP",
// "SCTP"), and records it as picked. As in AllocateClusterIP, the lower end of the range is used
// last, and a conflict makes the registry run admission again.
func (r *Registry) AllocateNodePort(attempt *api.Attempt, low, high int, protocols ...string) (int32, error) {
	size := uint64(high - low + 1)
	n, ok := r.pickFree(uint64(low), uint64(high)+1, min(max(size/32, 16), 128), func(n uint64) bool {
		for _, p := range protocols {
			if r.Reserved(SpaceNodePorts, portValue(p, n)) || attempt.IsPicked(SpaceNodePorts, portValue(p, n)) {
				return false
			}
		}
		return true
	})
	if !ok {
		return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: range is full (%d-%d)", low,
			high))
	}
	for _, p := range protocols {
		attempt.RecordPick(SpaceNodePorts, portValue(p, n))
	}
	return int32(n), nil
}

func portValue(protocol string, port uint64) string {
	return protocol + "-" + strconv.FormatUint(port, 10)
}

// pickFree returns a number in [first, end) for which isFree returns true. It returns false if it
// finds no such number. It picks a random number, but uses the first staticBand numbers only if no
// higher number is free: users may choose fixed numbers there.
func (r *Registry) pickFree(first, end, staticBand uint64, isFree func(uint64) bool) (uint64, bool) {
	if first >= end {
		return 0, false
	}
	split := min(first+staticBand, end)
	if n, ok := r.pickIn(split, end, isFree); ok {
		return n, true
	}
	return r.pickIn(first, split, isFree)
}

// maxProbe is the maximum number of consecutive numbers that pickIn tries after its random picks
// have failed. In a larger range, such as an IPv6 /64, a random pick practically always succeeds.
const maxProbe = 1 << 20

func (r *Registry) pickIn(first, end uint64, isFree func(uint64) bool) (uint64, bool) {
	if first >= end {
		return 0, false
	}
	size := end - first
	for range 8 {
		if n := first + r.randomN(size); isFree(n) {
			return n, true
		}
	}
	start := r.randomN(size)
	for i := range min(size, maxProbe) {
		if n := first + (start+i)%size; isFree(n) {
			return n, true
		}
	}
	return 0, false
}

// addrAt returns the address at offset n in a prefix.
func addrAt(prefix netip.Prefix, n uint64) netip.Addr {
	if prefix.Addr().Is4() {
		b := prefix.Addr().As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := prefix.Addr().As16()
	sum := new(big.Int).Add(new(big.Int).SetBytes(b[:]), new(big.Int).SetUint64(n))
	sum.FillBytes(b[:])
	return netip.AddrFrom16(b)
}
