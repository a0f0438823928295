package server

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"keelson.dev/keelson/controlplane/controllers/nodecidr"
)

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

// validate names the field that is wrong.
func (c Cluster) validate() error {
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

// reaches refuses an address of a replica that pods cannot be sent to, or that is in a range of the cluster's own.
func (c Cluster) reaches(advertise string) error {
	ip, err := netip.ParseAddr(advertise)
	if err != nil {
		return nil // refused elsewhere
	}
	ip = ip.Unmap()
	first := c.servicePrefixes()[0]
	if first.Addr().Is4() != ip.Is4() {
		return fmt.Errorf("--advertise-address %s is not of the first family of --service-cidr %s: pods reach the API by that family; "+
			"give an address of it, or put the other family first when the cluster is made", advertise, c.ServiceCIDR)
	}
	if said, flag := c.holds(ip); said != "" {
		return fmt.Errorf("--advertise-address %s: name a range that nobody has addresses of, by %s; or give the machine another address", said, flag)
	}
	return nil
}

// holds says in which of the cluster's ranges a machine's address is, in the words of 'kctl cluster up', and the flag of that; "" = in
// none.
func (c Cluster) holds(ip netip.Addr) (said, flag string) {
	for _, r := range []struct{ list, of, flag string }{{c.ClusterCIDR, "pods", "--cluster-cidr"}, {c.ServiceCIDR, "Services", "--service-cidr"}} {
		for _, p := range mustPrefixes(r.list) {
			if p.Contains(ip.Unmap()) {
				return fmt.Sprintf("%s is in %s of the cluster's %s: nodes would look for it among them", ip, p, r.of), r.flag
			}
		}
	}
	return "", ""
}

func (c Cluster) clusterPrefixes() []netip.Prefix { return mustPrefixes(c.ClusterCIDR) }
func (c Cluster) servicePrefixes() []netip.Prefix { return mustPrefixes(c.ServiceCIDR) }

// mustPrefixes reads what validate has accepted.
func mustPrefixes(list string) []netip.Prefix {
	out, err := prefixesOf("range", list)
	if err != nil {
		panic(err)
	}
	return out
}

// secondService is the range of Services of the second family; the zero value where there is none.
func (c Cluster) secondService() netip.Prefix {
	if list := c.servicePrefixes(); len(list) > 1 {
		return list[1]
	}
	return netip.Prefix{}
}

// dnsIP is the address of Service kube-system/kube-dns: the tenth of the first range, as installations of Kubernetes have it.
func (c Cluster) dnsIP() netip.Addr {
	ip := c.servicePrefixes()[0].Addr()
	for range 10 {
		ip = ip.Next()
	}
	return ip
}

// serviceIP is the address of Service default/kubernetes: the first of the first range.
func (c Cluster) serviceIP() netip.Addr { return c.servicePrefixes()[0].Addr().Next() }

// AddFamily gives a cluster of one family a second one: on the disk of a stopped replica, and on each replica in turn with
// the same ranges. Nodes get pod addresses of it, and Services that ask for it addresses, from when the leader has it; pods
// that run keep what they have, and new pods get both.
func AddFamily(c Config, clusterCIDR, serviceCIDR string) (Cluster, error) {
	if c.DataDir == "" {
		return Cluster{}, errors.New("--data-dir: a replica needs a folder for its data")
	}
	release, err := c.lock()
	if err != nil {
		return Cluster{}, err
	}
	defer release()
	cluster, _, err := c.load()
	if err != nil {
		return cluster, err
	}
	pods, services := cluster.clusterPrefixes(), cluster.servicePrefixes()
	next := cluster
	next.ClusterCIDR = pods[0].String() + "," + clusterCIDR
	next.ServiceCIDR = services[0].String() + "," + serviceCIDR
	if len(pods) == 2 {
		if next.ClusterCIDR == cluster.ClusterCIDR && next.ServiceCIDR == cluster.ServiceCIDR {
			return cluster, nil // said again
		}
		return cluster, fmt.Errorf("the cluster has two families already: pods %s, Services %s", cluster.ClusterCIDR, cluster.ServiceCIDR)
	}
	if err := next.validate(); err != nil {
		return cluster, err
	}
	if err := writeJSON(filepath.Join(c.DataDir, clusterFile), next); err != nil {
		return cluster, err
	}
	return next, nil
}
