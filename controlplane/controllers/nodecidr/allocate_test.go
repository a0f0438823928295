package nodecidr

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"
)

func mustRange(t interface{ Fatal(...any) }, cluster string, bits int) Range {
	r, err := NewRange(netip.MustParsePrefix(cluster), bits)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBlocks(t *testing.T) {
	for _, c := range []struct {
		cluster string
		bits, i int
		want    string
	}{
		{"10.244.0.0/16", 24, 0, "10.244.0.0/24"}, {"10.244.0.0/16", 24, 255, "10.244.255.0/24"},
		{"10.244.7.9/16", 24, 3, "10.244.3.0/24"}, {"10.0.0.0/8", 26, 5, "10.0.1.64/26"},
		{"10.244.1.0/24", 24, 0, "10.244.1.0/24"},
		{"fd00:10::/48", 64, 0x1ff, "fd00:10:0:1ff::/64"}, {"fd00::/100", 112, 7, "fd00::7:0/112"},
	} {
		r := mustRange(t, c.cluster, c.bits)
		got := r.Block(c.i)
		if got.String() != c.want {
			t.Errorf("block %d of %s: %s, want %s", c.i, r, got, c.want)
		}
		if first, last, in := r.positionSpan(got); !in || first != c.i || last != c.i {
			t.Errorf("%s is at %d to %d of %s", got, first, last, r)
		}
	}
	for _, bad := range []struct {
		cluster string
		bits    int
	}{{"10.244.0.0/16", 8}, {"10.244.0.0/16", 33}, {"fd00::/16", 64}} {
		if _, err := NewRange(netip.MustParsePrefix(bad.cluster), bad.bits); err == nil {
			t.Errorf("%s in /%d was accepted", bad.cluster, bad.bits)
		}
	}
}

func TestOptions(t *testing.T) {
	rs, err := Options{ClusterCIDR: "10.244.0.0/16, fd00:10::/56"}.Ranges()
	if err != nil || len(rs) != 2 || rs[0].bits != 24 || rs[1].bits != 64 {
		t.Fatalf("%v, %v", rs, err)
	}
	if _, err := (Options{ClusterCIDR: "10.244.0.0"}).Ranges(); err == nil {
		t.Error("an address is no network")
	}
}

// No two nodes ever overlap, whatever joined, left or was set by hand, and every block is used before it is refused.
func TestAllocationNeverOverlaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := mustRange(t, "10.244.0.0/20", 24) // 16 blocks
		var used []netip.Prefix
		if rapid.Bool().Draw(t, "a larger block by hand") {
			used = append(used, netip.MustParsePrefix("10.244.4.0/22"))
		}
		if rapid.Bool().Draw(t, "a smaller one") {
			used = append(used, netip.MustParsePrefix("10.244.9.128/25"))
		}
		if rapid.Bool().Draw(t, "a strange one") {
			used = append(used, netip.MustParsePrefix("192.0.2.0/24"))
		}
		at := 0
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(used) > 0 && rapid.IntRange(0, 2).Draw(t, "leave") == 0 {
				i := rapid.IntRange(0, len(used)-1).Draw(t, "who")
				used = append(used[:i], used[i+1:]...)
				continue
			}
			if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
				at = 0 // a new leader has no state except the nodes' blocks
			}
			taken, wide := map[string]bool{}, []netip.Prefix(nil)
			for _, u := range used {
				for _, k := range blocksOf(&corev1.Node{Spec: corev1.NodeSpec{PodCIDR: u.String()}}, []Range{r}) {
					taken[k] = true
					if k == wideBlocks {
						wide = append(wide, u)
					}
				}
			}
			block, position, ok := r.Next(func(i int) bool { return taken[blockKey(0, i)] }, wide, at)
			if !ok {
				for i := range r.Size() {
					free := true
					for _, u := range used {
						free = free && !u.Overlaps(r.Block(i))
					}
					if free {
						t.Fatalf("%s is free but was not found", r.Block(i))
					}
				}
				continue
			}
			for _, u := range used {
				if u.Overlaps(block) {
					t.Fatalf("%s overlaps %s", block, u)
				}
			}
			used = append(used, block)
			at = (position + 1) % r.Size()
		}
	})
}

// F108: a node gets a block of each family that it lacks, and keeps its blocks.
func TestMissing(t *testing.T) {
	ranges, err := Options{ClusterCIDR: "10.244.0.0/16,fd44::/48"}.Ranges()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		spec corev1.NodeSpec
		want []int
	}{
		{corev1.NodeSpec{}, []int{0, 1}},
		{corev1.NodeSpec{PodCIDR: "10.244.3.0/24"}, []int{1}},
		{corev1.NodeSpec{PodCIDRs: []string{"fd44::/64"}}, []int{0}},
		{corev1.NodeSpec{PodCIDRs: []string{"10.244.3.0/24", "fd44::/64"}}, nil},
	} {
		if got := Missing(&corev1.Node{Spec: c.spec}, ranges); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.spec, got, c.want)
		}
	}
}
