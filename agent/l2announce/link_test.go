package l2announce

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"keelson.dev/keelson/test/testenv/space"
)

// F117: a link that failed to open the sockets for an address does not report the address as held,
// returns the error each time, and answers as soon as it succeeds.
func TestBeginsWhenItCan(t *testing.T) {
	h := hosts(t, "w1")["w1"]
	want := map[netip.Addr]bool{vip4: true, vip6: true}
	l := newLink("eth0", 1<<30, h.mac, slog.New(slog.NewTextHandler(t.Output(), nil)))
	err := space.In(h.ns, func() error {
		for range 2 {
			if err := l.setAddresses(t.Context(), want); err == nil || l.isHeld(vip4) || l.isHeld(vip6) {
				t.Errorf("on an interface that there is not: %v, answers %v %v", err, l.isHeld(vip4), l.isHeld(vip6))
			}
		}
		on, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		l.index = on.Attrs().Index
		return l.setAddresses(t.Context(), want)
	})
	defer l.shutDown()
	if err != nil || !l.isHeld(vip4) || !l.isHeld(vip6) {
		t.Errorf("%v, answers %v %v", err, l.isHeld(vip4), l.isHeld(vip6))
	}
	if err := space.In(h.ns, func() error {
		return l.setAddresses(t.Context(), nil)
	}); err != nil || l.isHeld(vip4) || len(l.groupUsers) > 0 {
		t.Errorf("%v, answers %v, groups %v", err, l.isHeld(vip4), l.groupUsers)
	}
}
