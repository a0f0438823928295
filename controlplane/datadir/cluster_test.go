package datadir

import (
	"strings"
	"testing"
)

// F108: the ranges of a cluster, and the errors for invalid ranges.
func TestClusterRanges(t *testing.T) {
	for _, c := range []struct{ pods, services, advertise, want string }{
		{"10.244.0.0/16", "10.96.0.0/16", "192.0.2.1", ""},
		{"10.244.0.0/16,fd44::/48", "10.96.0.0/16, fd96::/112", "192.0.2.1", ""},
		{"fd44::/48", "fd96::/108", "fd00::1", ""},
		{"fd44::/48,10.244.0.0/16", "fd96::/108,10.96.0.0/16", "fd00::1", ""},
		{"10.244.0.0/16", "10.244.8.0/24", "192.0.2.1",
			"--cluster-cidr 10.244.0.0/16 and --service-cidr 10.244.8.0/24 overlap"},
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
		{"10.244.0.0/16", "10.96.0.0/16", "10.96.3.4",
			"--advertise-address 10.96.3.4 is in 10.96.0.0/16 of the cluster's Services: " +
				"nodes would look for it among them: name a range that nobody has addresses of, by " +
				"--service-cidr; or give the machine another address"},
		{"10.244.0.0/16", "10.96.0.0/16", "::ffff:10.244.3.4", "10.244.3.4 is in 10.244.0.0/16 of the cluster's pods"},
	} {
		cluster := Cluster{ClusterCIDR: c.pods, ServiceCIDR: c.services}
		err := cluster.Validate()
		if err == nil {
			err = cluster.CheckAdvertise(c.advertise)
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s at %s: %v, want %q", c.pods, c.services, c.advertise, err, c.want)
		}
	}
}
