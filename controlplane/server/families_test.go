package server

import (
	"path/filepath"
	"strings"
	"testing"
)

// F108: what the ranges of a cluster may be, and what is said where they cannot be so.
func TestClusterRanges(t *testing.T) {
	for _, c := range []struct{ pods, services, advertise, want string }{
		{"10.244.0.0/16", "10.96.0.0/16", "192.0.2.1", ""},
		{"10.244.0.0/16,fd44::/48", "10.96.0.0/16, fd96::/112", "192.0.2.1", ""},
		{"fd44::/48", "fd96::/108", "fd00::1", ""},
		{"fd44::/48,10.244.0.0/16", "fd96::/108,10.96.0.0/16", "fd00::1", ""},
		{"10.244.0.0/16", "10.244.8.0/24", "192.0.2.1", "--cluster-cidr 10.244.0.0/16 and --service-cidr 10.244.8.0/24 overlap"},
		{"10.244.0.0/16,fd44::/48", "10.96.0.0/16,fd44:0:0:1::/112", "192.0.2.1", "overlap"},
		{"10.244.0.0/16,fd44::/48", "10.96.0.0/16", "192.0.2.1", "not of the same families"},
		{"10.244.0.0/16,fd44::/48", "fd96::/112,10.96.0.0/16", "192.0.2.1", "not of the same families"},
		{"10.244.0.0/16,10.245.0.0/16", "10.96.0.0/16", "192.0.2.1", "one of IPv4 and one of IPv6"},
		{"10.244.0.0/16,fd44::/48,fd45::/48", "10.96.0.0/16", "192.0.2.1", "one of IPv4 and one of IPv6"},
		{"pods", "10.96.0.0/16", "192.0.2.1", `--cluster-cidr "pods"`},
		{"10.244.0.0/25", "10.96.0.0/16", "192.0.2.1", "at least 256 addresses"},
		{"fd44::/64", "fd96::/112", "fd00::1", "/40 to /63"},
		{"fd44::/32", "fd96::/112", "fd00::1", "/40 to /63"},
		{"fd44::/48", "fd96::/48", "fd00::1", "/64 to /120"},
		{"::ffff:10.0.0.0/112", "10.96.0.0/16", "192.0.2.1", "as IPv4"},
		{"169.254.0.0/16", "10.96.0.0/16", "192.0.2.1", "not routed"},
		{"fd44::/48", "fd96::/112", "192.0.2.1", "not of the first family"},
		{"10.244.0.0/16", "10.96.0.0/16", "10.96.3.4", "--advertise-address 10.96.3.4 is in 10.96.0.0/16 of the cluster's Services: " +
			"nodes would look for it among them: name a range that nobody has addresses of, by --service-cidr; or give the machine another address"},
		{"10.244.0.0/16", "10.96.0.0/16", "::ffff:10.244.3.4", "10.244.3.4 is in 10.244.0.0/16 of the cluster's pods"},
	} {
		cluster := Cluster{ClusterCIDR: c.pods, ServiceCIDR: c.services}
		err := cluster.validate()
		if err == nil {
			err = cluster.reaches(c.advertise)
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s at %s: %v, want %q", c.pods, c.services, c.advertise, err, c.want)
		}
	}
}

// F108: a second family is added to a cluster that was made with one, the same may be said again, and nothing else.
func TestAddFamily(t *testing.T) {
	c := Config{Name: "a", DataDir: t.TempDir(), Advertise: "192.0.2.1"}
	if _, err := Init(c, Cluster{}, Founding{}); err != nil {
		t.Fatal(err)
	}
	refused := func(pods, services, want string) {
		t.Helper()
		if _, err := AddFamily(c, pods, services); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s %s: %v, want %q", pods, services, err, want)
		}
	}
	refused("10.245.0.0/16", "10.97.0.0/16", "one of IPv4 and one of IPv6")
	refused("fd44::/48", "fd44::/112", "overlap")
	for range 2 {
		got, err := AddFamily(c, "fd44::/48", "fd96::/112")
		if err != nil || got.ClusterCIDR != "10.244.0.0/16,fd44::/48" || got.ServiceCIDR != "10.96.0.0/16,fd96::/112" {
			t.Errorf("%+v, %v", got, err)
		}
	}
	refused("fd45::/48", "fd96::/112", "two families already")
	var stored Cluster
	if _, err := readJSON(filepath.Join(c.DataDir, clusterFile), &stored); err != nil || stored.serviceIP().String() != "10.96.0.1" {
		t.Errorf("%+v, %v", stored, err)
	}
	release, err := c.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	refused("fd44::/48", "fd96::/112", "stop it first")
}
