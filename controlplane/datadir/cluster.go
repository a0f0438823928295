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

// Cluster is what all replicas of a cluster have in common. It is fixed by Init
// and handed to every joining replica.
type Cluster struct {
	Name        string `json:"name"`
	ClusterCIDR string `json:"clusterCIDR"` // one prefix, or one of each family with a comma between
	ServiceCIDR string `json:"serviceCIDR"` // of the same families in the same order
	Domain      string `json:"domain"`
	APIPort     int    `json:"apiPort"`
	FleetPort   int    `json:"fleetPort"`
	PeerPort    int    `json:"peerPort"`
	// ID tells this cluster from all others, also from those of its name.
	// A cluster that was made before there were any gets one from its name and CA.
	ID string `json:"id,omitempty"`
	// Encrypted says that no replica may write its store in clear for want of a
	// key file. Clusters that were made before there was one by default have it false.
	Encrypted bool `json:"encrypted,omitempty"`
}

// Defaults of a cluster.
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

// SetID gives the cluster the identity that its backups carry. It is made
// once and stays, whatever becomes of the keys it was made from.
func (c *Cluster) SetID(trust *pki.Trust) error {
	if trust == nil {
		return errors.New("a cluster is known by its CA, and there is none")
	}
	if c.ID == "" {
		c.ID = c.Name + "-" + trust.CA.Hash()[:16]
	}
	return nil
}

// ClusterID is the ID of the cluster that a data folder is of; "" where there is no such folder, or it cannot be read.
func ClusterID(dataDir string) string {
	var cluster Cluster
	if found, err := ReadJSON(filepath.Join(dataDir, ClusterFile), &cluster); err != nil || !found {
		return ""
	}
	if cluster.ID == "" { // made before there were IDs
		var err error
		if cluster, _, err = (Dir{Path: dataDir}).Load(); err != nil {
			return ""
		}
	}
	return cluster.ID
}

// prefixesOf reads one prefix, or one of each family with a comma between.
func prefixesOf(flag, text string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for s := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w: give a prefix such as 10.244.0.0/16, or one of each family with a comma between", flag, text, err)
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

// The bounds of ranges: a /64 of IPv6 is one node's pods, and Services of IPv6 have as many addresses as Kubernetes permits.
const (
	minBits6, maxBits6  = 40, 63
	minServices6, most6 = 64, 120
	maxBits4            = 24
)

// Validate names the field that is wrong.
func (c Cluster) Validate() error {
	pods, err := prefixesOf("--cluster-cidr", c.ClusterCIDR)
	if err != nil {
		return err
	}
	services, err := prefixesOf("--service-cidr", c.ServiceCIDR)
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
		{"--service-cidr", services, minServices6, most6, "/64 to /120", "each Service takes an address of it"},
	} {
		for _, p := range f.list {
			switch {
			case p.Addr().Is4() && p.Bits() > maxBits4:
				return fmt.Errorf("%s %q: want an IPv4 prefix of at least 256 addresses", f.flag, p)
			case p.Addr().Is6() && (p.Bits() < f.min6 || p.Bits() > f.max6):
				return fmt.Errorf("%s %q: want an IPv6 prefix of %s: %s", f.flag, p, f.needed, f.use)
			case p.Addr().IsLoopback() || p.Addr().IsMulticast() || p.Addr().IsLinkLocalUnicast():
				return fmt.Errorf("%s %q: these addresses are not routed between machines: give a private range", f.flag, p)
			}
		}
	}
	if len(pods) != len(services) || pods[0].Addr().Is4() != services[0].Addr().Is4() {
		return fmt.Errorf("--cluster-cidr %s and --service-cidr %s are not of the same families in the same order: "+
			"give one prefix of each family to both, the family that is to come first in front", c.ClusterCIDR, c.ServiceCIDR)
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

// CheckAdvertise refuses an address of a replica that pods cannot be sent to, or that is in a range of the cluster's own.
func (c Cluster) CheckAdvertise(advertise string) error {
	ip, err := netip.ParseAddr(advertise)
	if err != nil {
		return nil // refused elsewhere
	}
	ip = ip.Unmap()
	first := c.ServicePrefixes()[0]
	if first.Addr().Is4() != ip.Is4() {
		return fmt.Errorf("--advertise-address %s is not of the first family of --service-cidr %s: pods reach the API by that family; "+
			"give an address of it, or put the other family first when the cluster is made", advertise, c.ServiceCIDR)
	}
	if said, flag := c.RangeOf(ip); said != "" {
		return fmt.Errorf("--advertise-address %s: name a range that nobody has addresses of, by %s; or give the machine another address", said, flag)
	}
	return nil
}

// RangeOf says in which of the cluster's ranges a machine's address is, in the words of 'kctl cluster up', and the flag of that; "" = in
// none.
func (c Cluster) RangeOf(ip netip.Addr) (said, flag string) {
	for _, r := range []struct{ list, of, flag string }{{c.ClusterCIDR, "pods", "--cluster-cidr"}, {c.ServiceCIDR, "Services", "--service-cidr"}} {
		for _, p := range mustPrefixes(r.list) {
			if p.Contains(ip.Unmap()) {
				return fmt.Sprintf("%s is in %s of the cluster's %s: nodes would look for it among them", ip, p, r.of), r.flag
			}
		}
	}
	return "", ""
}

// ClusterPrefixes returns the ranges of pods, one of each family.
func (c Cluster) ClusterPrefixes() []netip.Prefix { return mustPrefixes(c.ClusterCIDR) }

// ServicePrefixes returns the ranges of Services, one of each family.
func (c Cluster) ServicePrefixes() []netip.Prefix { return mustPrefixes(c.ServiceCIDR) }

// mustPrefixes reads what validate has accepted.
func mustPrefixes(list string) []netip.Prefix {
	out, err := prefixesOf("range", list)
	if err != nil {
		panic(err)
	}
	return out
}

// SecondServiceCIDR is the range of Services of the second family; the zero value where none exists.
func (c Cluster) SecondServiceCIDR() netip.Prefix {
	if list := c.ServicePrefixes(); len(list) > 1 {
		return list[1]
	}
	return netip.Prefix{}
}

// DNSServiceIP is the address of Service kube-system/kube-dns: the tenth of the first range, as installations of Kubernetes have it.
func (c Cluster) DNSServiceIP() netip.Addr {
	ip := c.ServicePrefixes()[0].Addr()
	for range 10 {
		ip = ip.Next()
	}
	return ip
}

// APIServiceIP is the address of Service default/kubernetes: the first of the first range.
func (c Cluster) APIServiceIP() netip.Addr { return c.ServicePrefixes()[0].Addr().Next() }
