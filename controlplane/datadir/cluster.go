package datadir

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/controlplane/controllers/nodecidr"
	"keelson.dev/keelson/controlplane/pki"
)

// Cluster is the configuration that all replicas of a cluster share. Init creates it, and every
// joining replica receives it. It does not change, except when a second IP family is added
// (recovery.AddFamily).
type Cluster struct {
	Name        string `json:"name"`
	ClusterCIDR string `json:"clusterCIDR"` // one CIDR, or an IPv4 and an IPv6 CIDR separated by a comma
	ServiceCIDR string `json:"serviceCIDR"` // CIDRs of the same IP families as ClusterCIDR, in the same order
	Domain      string `json:"domain"`
	APIPort     int    `json:"apiPort"`
	FleetPort   int    `json:"fleetPort"`
	PeerPort    int    `json:"peerPort"`
	// ID is unique for each cluster, even among clusters with the same name. If a release without
	// IDs created the cluster, the ID is derived from its name and CA.
	ID string `json:"id,omitempty"`
	// Encrypted means that every replica requires a key file, so that no store is written
	// unencrypted because its key file is missing. It is false for clusters that were created
	// before encryption was the default.
	Encrypted bool `json:"encrypted,omitempty"`
}

// SetDefaults sets empty fields to their defaults.
func (c *Cluster) SetDefaults() {
	set := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	set(&c.Name, "keelson")
	set(&c.ClusterCIDR, "10.244.0.0/16")
	set(&c.ServiceCIDR, "10.96.0.0/16")
	set(&c.Domain, "cluster.local")
	for _, p := range []struct {
		port *int
		v    int
	}{{&c.APIPort, 6443}, {&c.FleetPort, 6444}, {&c.PeerPort, 6445}} {
		if *p.port == 0 {
			*p.port = p.v
		}
	}
}

// SetID sets the ID of the cluster to a value that is derived from its name and CA. The backups of
// the cluster contain the ID. An existing ID does not change, even if the CA was rotated since.
func (c *Cluster) SetID(trust *pki.Trust) error {
	if trust == nil {
		return errors.New("the cluster has no CA, from which its ID is derived")
	}
	if c.ID == "" {
		c.ID = c.Name + "-" + trust.CA.Hash()[:16]
	}
	return nil
}

// ClusterID returns the ID of the cluster to which the data directory dataDir belongs. It returns
// "" if the directory does not exist or cannot be read.
func ClusterID(dataDir string) string {
	var cluster Cluster
	if found, err := ReadJSON(filepath.Join(dataDir, ClusterFile), &cluster); err != nil || !found {
		return ""
	}
	if cluster.ID == "" { // created by a release without IDs
		var err error
		if cluster, _, err = (Dir{Path: dataDir}).Load(); err != nil {
			return ""
		}
	}
	return cluster.ID
}

// parsePrefixes parses text, which is one CIDR, or an IPv4 and an IPv6 CIDR separated by a comma.
// The error names flag.
func parsePrefixes(flag, text string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for s := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return nil,
				fmt.Errorf("%s %q: %w: want a CIDR such as 10.244.0.0/16, or an IPv4 and an IPv6 CIDR separated "+
					"by a comma",
					flag, text, err)
		}
		if p.Addr().Is4In6() {
			return nil, fmt.Errorf("%s %q: write %s as IPv4", flag, text, p)
		}
		out = append(out, p.Masked())
	}
	if len(out) > 2 || len(out) == 2 && out[0].Addr().Is4() == out[1].Addr().Is4() {
		return nil, fmt.Errorf("%s %q: want one prefix, or one of IPv4 and one of IPv6", flag, text)
	}
	return out, nil
}

// Limits of the prefix lengths of pod and Service ranges. The names with 6 are for IPv6, and
// maxBits4 is for IPv4. Each node uses a /64 of an IPv6 pod range. The limits of IPv6 Service
// ranges are the same as in Kubernetes.
const (
	minBits6, maxBits6         = 40, 63
	minServices6, maxServices6 = 64, 120
	maxBits4                   = 24
)

// Validate returns an error if a field is invalid. The error names the field's flag.
func (c Cluster) Validate() error {
	pods, err := parsePrefixes("--cluster-cidr", c.ClusterCIDR)
	if err != nil {
		return err
	}
	services, err := parsePrefixes("--service-cidr", c.ServiceCIDR)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		flag        string
		list        []netip.Prefix
		min6, max6  int
		needed, use string
	}{
		{"--cluster-cidr", pods, minBits6, maxBits6, "/40 to /63", "each node takes a /64 of it"},
		{"--service-cidr", services, minServices6, maxServices6, "/64 to /120", "each Service takes an address of it"},
	} {
		for _, p := range f.list {
			switch {
			case p.Addr().Is4() && p.Bits() > maxBits4:
				return fmt.Errorf("%s %q: want an IPv4 prefix of at least 256 addresses", f.flag, p)
			case p.Addr().Is6() && (p.Bits() < f.min6 || p.Bits() > f.max6):
				return fmt.Errorf("%s %q: want an IPv6 prefix of %s: %s", f.flag, p, f.needed, f.use)
			case p.Addr().IsLoopback() || p.Addr().IsMulticast() || p.Addr().IsLinkLocalUnicast():
				return fmt.Errorf("%s %q: these addresses are not routed between machines: give a private range",
					f.flag, p)
			}
		}
	}
	if len(pods) != len(services) || pods[0].Addr().Is4() != services[0].Addr().Is4() {
		return fmt.Errorf("--cluster-cidr %s and --service-cidr %s are not of the same families in the same order: "+
			"give both one CIDR of each family, the primary family first",
			c.ClusterCIDR, c.ServiceCIDR)
	}
	for _, a := range pods {
		for _, b := range services {
			if a.Overlaps(b) {
				return fmt.Errorf("--cluster-cidr %s and --service-cidr %s overlap: give different ranges", a, b)
			}
		}
	}
	if _, err := (nodecidr.Options{ClusterCIDR: c.ClusterCIDR}).Ranges(); err != nil {
		return fmt.Errorf("--cluster-cidr: %w", err)
	}
	return nil
}

// CheckAdvertise checks advertise, the IP address of a replica. It returns an error if the address
// is in a pod or Service range of the cluster. The address must be of the first IP family of the
// Service ranges.
func (c Cluster) CheckAdvertise(advertise string) error {
	ip, err := netip.ParseAddr(advertise)
	if err != nil {
		return nil // an invalid address is reported elsewhere
	}
	ip = ip.Unmap()
	first := c.ServicePrefixes()[0]
	if first.Addr().Is4() != ip.Is4() {
		return fmt.Errorf("--advertise-address %s is not of the first family of --service-cidr %s: pods reach "+
			"the API with that family; use an address of it, or create the cluster with the other family first",
			advertise, c.ServiceCIDR)
	}
	if description, flag := c.RangeOf(ip); description != "" {
		return fmt.Errorf("--advertise-address %s: name a range that nobody has addresses of, by %s; or give the "+
			"machine another address", description, flag)
	}
	return nil
}

// RangeOf checks whether ip, the address of a machine, is in a pod or Service range of the cluster.
// If it is, RangeOf returns a description of the conflict, as part of an error message, and the
// flag that sets the range. Otherwise it returns empty strings.
func (c Cluster) RangeOf(ip netip.Addr) (description, flag string) {
	for _, r := range []struct{ list, of, flag string }{{c.ClusterCIDR, "pods", "--cluster-cidr"},
		{c.ServiceCIDR, "Services", "--service-cidr"}} {
		for _, p := range mustPrefixes(r.list) {
			if p.Contains(ip.Unmap()) {
				return fmt.Sprintf("%s is in %s of the cluster's %s: nodes would look for it among them", ip, p, r.of),
					r.flag
			}
		}
	}
	return "", ""
}

// ClusterPrefixes returns the pod ranges, one per IP family.
func (c Cluster) ClusterPrefixes() []netip.Prefix { return mustPrefixes(c.ClusterCIDR) }

// ServicePrefixes returns the Service ranges, one per IP family.
func (c Cluster) ServicePrefixes() []netip.Prefix { return mustPrefixes(c.ServiceCIDR) }

// mustPrefixes parses CIDRs that Validate has accepted, separated by commas. It panics if they are
// invalid.
func mustPrefixes(list string) []netip.Prefix {
	out, err := parsePrefixes("range", list)
	if err != nil {
		panic(err)
	}
	return out
}

// SecondServiceCIDR returns the Service range of the second IP family. It returns the zero value if
// the cluster has only one family.
func (c Cluster) SecondServiceCIDR() netip.Prefix {
	if list := c.ServicePrefixes(); len(list) > 1 {
		return list[1]
	}
	return netip.Prefix{}
}

// DNSServiceIP returns the address of Service kube-system/kube-dns: the tenth address of the first
// Service range, as is usual in Kubernetes.
func (c Cluster) DNSServiceIP() netip.Addr {
	ip := c.ServicePrefixes()[0].Addr()
	for range 10 {
		ip = ip.Next()
	}
	return ip
}

// APIServiceIP returns the address of Service default/kubernetes: the first address of the first
// Service range.
func (c Cluster) APIServiceIP() netip.Addr { return c.ServicePrefixes()[0].Addr().Next() }
