package plan

import (
	"fmt"
	"net/netip"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// The ranges of a cluster whose file names none, as 'keelson-controlplane init' has them.
const defaultPods, defaultServices = "10.244.0.0/16", "10.96.0.0/16"

// clusterRange is a range of the cluster.
type clusterRange struct {
	netip.Prefix
	of, key string // what has addresses in it, and the flag of init
}

// ranges judges whether what a machine is, or has to do with, is in a range of the cluster. A node sends nothing for those out by its
// default route: what is behind that it would not reach any more, and not answer, this connection included.
func (j *judge) ranges(h machines.Host, f machines.Facts) {
	all, made := j.clusterRanges()
	own, err := netip.ParseAddr(h.Address)
	if err != nil {
		return
	}
	if r := within(all, own); r != nil {
		what := fmt.Sprintf("its address %s is in %s of the cluster's %s: nodes would look for it among them", own, r.Prefix, r.of)
		if made && !lacks(h, f) {
			j.light(h.Name, what, "give it another address: 'kctl cluster remove "+h.Name+"', and 'up' with that in the file")
		} else {
			j.grave(h.Name, what, r.remedy(made, "give it another address"))
		}
		return
	}
	if !h.Is(machines.Worker) || f.Node || j.otherNetwork(h) {
		return
	}
	var led []netip.Prefix // into a range, and more precisely than the whole of it
	for _, n := range f.Routes {
		r := within(all, n.Prefix.Addr())
		if r == nil || n.Prefix.Bits() < r.Bits() {
			continue
		}
		led = append(led, n.Prefix)
		what := fmt.Sprintf("has a route to %s by %s, which is in %s of the cluster's %s", n.Prefix, printable(n.Link), r.Prefix, r.of)
		if made { // whoever is there goes on being reached: of the cluster's addresses those are not that are the same
			j.light(h.Name, what+": those with such addresses it does not reach", "take the route away, if nothing needs it")
		} else {
			j.grave(h.Name, what, r.remedy(made, "take the route away, if nothing needs it"))
		}
	}
	cutOff := func(address, what, otherwise string) {
		a, err := netip.ParseAddr(address)
		if err != nil {
			return
		}
		r := within(all, a)
		for _, p := range led {
			if p.Contains(a) {
				return
			}
		}
		switch {
		case r == nil:
		case made && r.of == services && address != f.From: // it may be one of the cluster's own
			j.light(h.Name, fmt.Sprintf(what, a)+fmt.Sprintf(", which is in %s of the cluster's %s", r.Prefix, r.of), "see that it is a Service; else "+otherwise)
		default:
			j.grave(h.Name, fmt.Sprintf(what, a)+fmt.Sprintf(", which is in %s of the cluster's %s: as a node it would send nothing there any more", r.Prefix, r.of), r.remedy(made, otherwise))
		}
	}
	cutOff(f.From, "is reached from %s", "reach it from another address")
	for _, server := range f.Nameservers {
		cutOff(server, "asks the nameserver %s", "have it ask another one")
	}
}

const pods, services = "pods", "Services"

// remedy is another range while the cluster is not made, or what has to be done otherwise: ranges of a cluster stay.
func (r *clusterRange) remedy(made bool, otherwise string) string {
	if made {
		return otherwise
	}
	return fmt.Sprintf("name a range that nobody has addresses of, as init: {%s: ...} of the file; or %s", r.key, otherwise)
}

// clusterRanges are those that the cluster has, and that it is made; or those that it will be made with. What is no range is left to
// init, which refuses it.
func (j *judge) clusterRanges() (all []clusterRange, made bool) {
	lists := map[string]string{"cluster-cidr": defaultPods, "service-cidr": defaultServices}
	for _, flag := range j.c.Init {
		if k, v, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "="); lists[k] != "" {
			lists[k] = v
		}
	}
	if _, _, from := j.own(); from != "" {
		f := j.facts[from]
		lists, made = map[string]string{"cluster-cidr": f.PodRanges, "service-cidr": f.ServiceRanges}, true
	}
	for _, of := range []struct{ what, key string }{{pods, "cluster-cidr"}, {services, "service-cidr"}} {
		for text := range strings.SplitSeq(lists[of.key], ",") {
			if p, err := netip.ParsePrefix(strings.TrimSpace(strings.Trim(text, `"`))); err == nil {
				all = append(all, clusterRange{p.Masked(), of.what, of.key})
			}
		}
	}
	return all, made
}

// within is the range that has an address; nil = none.
func within(all []clusterRange, a netip.Addr) *clusterRange {
	for i, r := range all {
		if r.Contains(a.Unmap()) {
			return &all[i]
		}
	}
	return nil
}
