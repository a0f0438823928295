package watchcache

import (
	"sync/atomic"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// reservationIndex maps each reserved unique value, such as a cluster IP, to the key of the object
// that reserved it. The keys of the map are "space/value". Readers use the published copy. Only
// Cache.Run changes the index.
type reservationIndex struct {
	published atomic.Pointer[btree.Map[string, string]]
	building  *btree.Map[string, string]
}

// replaceAll replaces all reservations of the index and publishes the new ones to readers.
func (x *reservationIndex) replaceAll(reservations *btree.Map[string, string]) {
	x.building = reservations
	x.publishCopy()
}

// applyEvent applies the creation or deletion of a reservation ("space/value") to the index.
// Readers see the change after the next call of publishCopy.
func (x *reservationIndex) applyEvent(ev *raftstore.Event, reservation string) {
	if ev.Kind == raftstore.EventDelete {
		x.building.Delete(reservation)
	} else {
		x.building.Set(reservation, string(ev.Item.Value))
	}
}

func (x *reservationIndex) publishCopy() { x.published.Store(x.building.Copy()) }

// Holder returns the key of the object that reserved a unique value, such as a cluster IP,
// according to the cache. ok is false if no object has reserved it.
func (c *Cache) Holder(space, value string) (key string, ok bool) {
	return c.reserved.published.Load().Get(space + "/" + value)
}

// ReservationKeys returns the store keys of all reservations of unique values, such as cluster IPs,
// that the object with the store key holderKey holds.
func (c *Cache) ReservationKeys(holderKey string) []string {
	var keys []string
	c.reserved.published.Load().Scan(func(reservation, key string) bool {
		if key == holderKey {
			keys = append(keys, storedform.ReservationsRoot+reservation)
		}
		return true
	})
	return keys
}
