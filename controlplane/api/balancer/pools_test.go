package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"
)

// F117: pools are read or refused with one sentence that names the pool, what is wrong and what to do.
func TestParse(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"a", `addresses: [192.0.2.0/28, 198.51.100.7, "2001:db8::10-2001:db8::20"]`, ""},
		{"a", `{"addresses": ["192.0.2.1"], "autoAssign": false, "namespaceSelector": {"matchLabels": ` +
			`{"team": "shop"}}}`, ""},
		{"A_b", `addresses: [192.0.2.1]`, "pool A_b: its name"},
		{"a", ``, "addresses is empty: specify CIDRs"},
		{"a", `adresses: [192.0.2.1]`, "unknown field \"adresses\""},
		{"a", `addresses: {a: b}`, "it is not valid YAML with addresses"},
		{"a", `addresses: [192.0.2.5/28]`, `address "192.0.2.5/28": specify a CIDR`},
		{"a", `addresses: [x]`, `address "x": specify a CIDR`},
		{"a", `addresses: [fe80::1%eth0]`, `address "fe80::1%eth0": specify a CIDR`},
		{"a", `addresses: [192.0.2.9-192.0.2.3]`, "is lower than the first"},
		{"a", `addresses: ["192.0.2.9-2001:db8::1"]`, "is lower than the first"},
		{"a", `addresses: [192.0.2.0/28, 192.0.2.15]`, "192.0.2.15 overlaps 192.0.2.0-192.0.2.15"},
		{"a", `addresses: [127.0.0.1]`, "loopback"},
		{"a", `addresses: [0.0.0.0/0]`, "loopback"},
		{"a", `addresses: ["::/0"]`, "loopback"},
		{"a", `addresses: [224.0.0.5]`, "multicast"},
		{"a", `addresses: ["::ffff:192.0.2.1"]`, "reserved"},
		{"a", "addresses: [192.0.2.1]\nserviceSelector: {matchExpressions: [{key: a, operator: Nope}]}",
			"serviceSelector"},
		{"a", "addresses: [192.0.2.1]\naddresses: [192.0.2.2]", "it is not valid YAML"},
		{"a", "addresses:" + strings.Repeat(" [", 9000), "bytes, at most"},
		{"a", "addresses: [" + strings.Repeat("192.0.2.1,", 65) + "]", "65 entries"},
	} {
		_, err := ParsePools(map[string]string{c.name: c.text})
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.text, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) ||
			strings.Contains(err.Error(), "\n")):
			t.Errorf("%.60s: %v, want one line with %q", c.text, err, c.want)
		}
	}
	_, err := ParsePools(map[string]string{"a": "addresses: [192.0.2.0/24]", "b": "addresses: [192.0.2.7]"})
	if err == nil || !strings.Contains(err.Error(), "pool b: 192.0.2.7 overlaps 192.0.2.0-192.0.2.255 of pool a") {
		t.Errorf("overlapping pools: %v", err)
	}
	many := map[string]string{}
	for i := range maxPools + 1 {
		many[strings.Repeat("a", i+1)] = "addresses: [192.0.2.1]"
	}
	if _, err := ParsePools(many); err == nil {
		t.Error("too many pools were read")
	}
	pools, err := ParsePools(map[string]string{"a": "addresses: [10.244.3.0/24]"})
	if err != nil {
		t.Fatal(err)
	}
	err = CheckConflicts(pools, []UsedRange{{PrefixRange(netip.MustParsePrefix("10.244.0.0/16")),
		"the addresses of pods 10.244.0.0/16"}})
	if err == nil || err.Error() != "pool a: 10.244.3.0-10.244.3.255 overlaps the addresses of pods 10.244.0.0/16: "+
		"use other addresses for the pool" {
		t.Errorf("a pool among pods: %v", err)
	}
}

// F117: the next free address is one of the pool's, and there is none only when all are taken; the search goes round.
func TestNext(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &Pool{Name: "a"}
		var all []netip.Addr
		for i := range rapid.IntRange(1, 4).Draw(t, "ranges") {
			from := netip.AddrFrom4([4]byte{192, 0, byte(i), byte(rapid.IntRange(1, 9).Draw(t, "from"))})
			if rapid.Bool().Draw(t, "six") {
				from = netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, byte(i), 15: 0xfe})
			}
			to := from
			for range rapid.IntRange(0, 4).Draw(t, "more") {
				to = to.Next()
			}
			p.Ranges = append(p.Ranges, Range{from, to})
			for a := from; a.Compare(to) <= 0; a = a.Next() {
				all = append(all, a)
			}
		}
		six := rapid.Bool().Draw(t, "family")
		want := 0
		for _, a := range all {
			if a.Is6() == six {
				want++
			}
		}
		taken := map[netip.Addr]bool{}
		after := rapid.SampledFrom(append(all, netip.Addr{})).Draw(t, "after")
		for {
			looked := 0
			a, ok := p.nextFree(six, after, func(a netip.Addr) bool { looked++; return !taken[a] })
			if looked > len(taken)+1 {
				t.Fatalf("looked at %d addresses with %d taken", looked, len(taken))
			}
			if !ok {
				break
			}
			if taken[a] || !slices.Contains(all, a) || a.Is6() != six {
				t.Fatalf("%s of %v, taken %v", a, p.Ranges, taken)
			}
			taken[a], after = true, a
		}
		if len(taken) != want {
			t.Fatalf("%d of %d addresses were given out", len(taken), want)
		}
	})
}

// F117: whatever a pool's text is, reading it ends, and what is read is within the bounds.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"addresses: [192.0.2.0/28]", "a: &a [*a]", "{addresses: [::/96]}",
		"addresses: [\"0-255.255.255.255\"]", "addresses: [fe80::%1/8-]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		pools, err := ParsePools(map[string]string{"a": text})
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		for _, r := range pools[0].Ranges {
			if !r.From.IsValid() || r.From.Is4() != r.To.Is4() || r.To.Less(r.From) || r.From.IsMulticast() ||
				r.To.IsLoopback() {
				t.Errorf("%q was read as %v", text, r)
			}
		}
	})
}

// F117: of the addresses that a node names, the first four internal and external ones of each family are its machine's.
func TestOfMachine(t *testing.T) {
	n := &corev1.Node{}
	for _, at := range []string{"Hostname=192.0.2.200", "InternalIP=nonsense", "InternalIP=192.0.2.1",
		"InternalIP=192.0.2.2", "InternalIP=2001:db8::1%eth0",
		"InternalIP=2001:db8::2", "ExternalIP=::ffff:198.51.100.1", "ExternalIP=198.51.100.2", "InternalIP=192.0.2.3",
		"InternalIP=192.0.2.4", "InternalIP=192.0.2.5"} {
		of, address, _ := strings.Cut(at, "=")
		n.Status.Addresses = append(n.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeAddressType(of), Address: address})
	}
	if got, want := fmt.Sprint(NodeAddresses(n)),
		"[192.0.2.1 192.0.2.2 2001:db8::1 2001:db8::2 198.51.100.1 198.51.100.2 192.0.2.3 192.0.2.4]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
