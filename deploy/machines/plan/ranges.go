package plan

import (
	"fmt"
	"net/netip"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// defaultPods and defaultServices are the default pod and Service ranges of 'keelson-controlplane
// init'.
const defaultPods, defaultServices = "10.244.0.0/16", "10.96.0.0/16"

// clusterRange is a pod or Service address range of the cluster.
type clusterRange struct {
	netip.Prefix
	purpose, key string // what the range is for (pods or services), and the flag of init that sets the range
}

// checkRanges adds a finding for each address that the machine h has or uses, if the address is in
// a pod or Service range of the cluster. It checks h.Address, the routes and nameservers of the
// machine, and the address of the SSH client. A node does not send packets to these ranges by its
// default route, so it could not reach such an address. The SSH connection itself might be lost.
func (j *inspector) checkRanges(h machines.Host, f machines.Facts) {
	all, made := j.clusterRanges()
	own, err := netip.ParseAddr(h.Address)
	if err != nil {
		return
	}
	if r := rangeContaining(all, own); r != nil {
		what := fmt.Sprintf("its address %s is in %s of the cluster's %s: nodes would look for it among them", own,
			r.Prefix, r.purpose)
		if made && !lacksRole(h, f) {
			j.addWarning(h.Name, what, "give it another address: 'kctl cluster remove "+h.Name+
				"', and 'up' with that in the file")
		} else {
			j.addError(h.Name, what, r.rangeRemedy(made, "give it another address"))
		}
		return
	}
	if !h.HasRole(machines.Worker) || f.Node || j.otherNetwork(h) {
		return
	}
	var led []netip.Prefix // destinations of other routes that are part of a range
	for _, n := range f.Routes {
		r := rangeContaining(all, n.Prefix.Addr())
		if r == nil || n.Prefix.Bits() < r.Bits() {
			continue
		}
		led = append(led, n.Prefix)
		what := fmt.Sprintf("has a route to %s by %s, which is in %s of the cluster's %s", n.Prefix, printable(n.Link),
			r.Prefix, r.purpose)
		if made { // a pod with such an address is not reachable
			j.addWarning(h.Name, what+": those with such addresses it does not reach",
				"take the route away, if nothing needs it")
		} else {
			j.addError(h.Name, what, r.rangeRemedy(made, "take the route away, if nothing needs it"))
		}
	}
	cutOff := func(address, what, otherwise string) {
		a, err := netip.ParseAddr(address)
		if err != nil {
			return
		}
		r := rangeContaining(all, a)
		for _, p := range led {
			if p.Contains(a) {
				return
			}
		}
		switch {
		case r == nil:
		case made && r.purpose == services && address != f.From: // the address may be that of a Service
			j.addWarning(h.Name, fmt.Sprintf(what, a)+
				fmt.Sprintf(", which is in %s of the cluster's %s", r.Prefix, r.purpose),
				"see that it is a Service; else "+otherwise)
		default:
			j.addError(h.Name, fmt.Sprintf(what, a)+
				fmt.Sprintf(", which is in %s of the cluster's %s: as a node it would send nothing there any more",
					r.Prefix, r.purpose), r.rangeRemedy(made, otherwise))
		}
	}
	cutOff(f.From, "is reached from %s", "reach it from another address")
	for _, server := range f.Nameservers {
		cutOff(server, "asks the nameserver %s", "have it ask another one")
	}
}

const pods, services = "pods", "Services"

// rangeRemedy returns the remedy for an address in the range r. If the cluster does not exist yet,
// the remedy is another range. The ranges of an existing cluster cannot change; then it returns
// otherRemedy.
func (r *clusterRange) rangeRemedy(exists bool, otherRemedy string) string {
	if exists {
		return otherRemedy
	}
	return fmt.Sprintf("name a range that nobody has addresses of, as init: {%s: ...} of the file; or %s",
		r.key, otherRemedy)
}

// clusterRanges returns the pod and Service ranges of the cluster, and true, if the cluster exists.
// Otherwise it returns the ranges with which the cluster will be created. Invalid ranges are
// omitted, because init refuses them.
func (j *inspector) clusterRanges() (all []clusterRange, exists bool) {
	lists := map[string]string{"cluster-cidr": defaultPods, "service-cidr": defaultServices}
	for _, flag := range j.c.Init {
		if k, v, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "="); lists[k] != "" {
			lists[k] = v
		}
	}
	if _, _, from := j.fileCluster(); from != "" {
		f := j.facts[from]
		lists, exists = map[string]string{"cluster-cidr": f.PodRanges, "service-cidr": f.ServiceRanges}, true
	}
	for _, of := range []struct{ what, key string }{{pods, "cluster-cidr"}, {services, "service-cidr"}} {
		for text := range strings.SplitSeq(lists[of.key], ",") {
			if p, err := netip.ParsePrefix(strings.TrimSpace(strings.Trim(text, `"`))); err == nil {
				all = append(all, clusterRange{p.Masked(), of.what, of.key})
			}
		}
	}
	return all, exists
}

// rangeContaining returns the first range that contains the address a, or nil.
func rangeContaining(all []clusterRange, a netip.Addr) *clusterRange {
	for i, r := range all {
		if r.Contains(a.Unmap()) {
			return &all[i]
		}
	}
	return nil
}
