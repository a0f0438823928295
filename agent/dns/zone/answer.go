package zone

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
)

// Version is the implemented version of the Kubernetes DNS specification.
const Version = "1.1.0"

// Options are the settings of the cluster's zone, from the kubernetes plugin in a Corefile.
type Options struct {
	TTL         uint32 // seconds
	Pods        bool   // answer names of pods, whether or not the pod exists
	PodNames    bool   // name endpoints without a hostname after their pods
	IgnoreEmpty bool   // the name of a Service without endpoints does not exist
	Namespaces  []string
	Servers     []netip.Addr // addresses of this DNS server, the records of ns.dns.ZONE
}

// Answer is the cluster zone's answer to a question.
type Answer struct {
	Rcode   int
	Records []dns.RR
	Extra   []dns.RR
	// Alias is the target of the last record, if it is a CNAME and the question was not for the
	// CNAME itself. The caller must resolve it.
	Alias string
	// Truncated reports that there are more records than the requested maximum.
	Truncated bool
}

// question is a question about the zone, with the answer that is being built.
type question struct {
	x     *Index
	o     *Options
	zone  string // for example "cluster.local."
	owner string // the name in the client's spelling
	kind  uint16
	turn  uint32
	most  int
	seen  map[string]struct{} // targets of SRV records
	out   Answer
}

// Answer returns the answer to a question of type kind about a name in the zone. owner is the name
// in the client's spelling, and name the same in lower case; both are fully qualified. rotation is
// the number of positions by which address records are rotated. maxEndpoints is the approximate
// maximum number of endpoint records.
func (x *Index) Answer(o *Options, zone, owner, name string, kind uint16, rotation uint32, maxEndpoints int) Answer {
	q := question{x: x, o: o, zone: zone, owner: owner, kind: kind, turn: rotation, most: maxEndpoints}
	rel := strings.TrimSuffix(strings.TrimSuffix(name, zone), ".")
	x.mu.RLock()
	defer x.mu.RUnlock()
	q.resolve(rel)
	return q.out
}

// resolve builds the answer for the name rel, which is relative to the zone.
func (q *question) resolve(rel string) {
	switch rel {
	case "":
		q.answerApex()
		return
	case "svc", "dns":
		return
	case "dns-version":
		if q.kind == dns.TypeTXT {
			q.addRecord(&dns.TXT{Hdr: q.recordHeader(q.owner, dns.TypeTXT), Txt: []string{Version}})
		}
		return
	case "ns.dns":
		q.addAddresses(q.o.Servers)
		return
	case "pod":
		if !q.o.Pods {
			q.out.Rcode = dns.RcodeNameError
		}
		return
	}
	if rest, ok := strings.CutSuffix(rel, ".svc"); ok {
		q.answerService(rest)
		return
	}
	if rest, ok := strings.CutSuffix(rel, ".pod"); ok && q.o.Pods {
		q.answerPod(rest)
		return
	}
	q.out.Rcode = dns.RcodeNameError
}

func (q *question) answerApex() {
	switch q.kind {
	case dns.TypeSOA:
		q.addRecord(SOA(q.zone, q.o.TTL, q.x.serial.Load()))
	case dns.TypeNS:
		q.addRecord(&dns.NS{Hdr: q.recordHeader(q.owner, dns.TypeNS), Ns: "ns.dns." + q.zone})
		for _, a := range q.o.Servers {
			q.out.Extra = append(q.out.Extra, q.addressRecord("ns.dns."+q.zone, a))
		}
	}
}

// SOA returns the SOA record of the zone. Its minimum TTL applies to negative answers.
func SOA(zone string, ttl, serial uint32) *dns.SOA {
	return &dns.SOA{Hdr: dns.RR_Header{Name: zone, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl},
		Ns: "ns.dns." + zone, Mbox: "hostmaster." + zone, Serial: serial, Refresh: 7200, Retry: 1800,
		Expire: 86400, Minttl: ttl}
}

// Serial returns the number of changes of the index since it was created.
func (x *Index) Serial() uint32 { return x.serial.Load() }

// answerService answers names below "svc": NS, SERVICE.NS, HOST.SERVICE.NS, _PROTO.SERVICE.NS and
// _PORT._PROTO.SERVICE.NS.
func (q *question) answerService(rest string) {
	rest, namespace := cutLast(rest)
	if q.isHidden(namespace) {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	if rest == "" {
		if q.x.namespaces[namespace] == 0 {
			q.out.Rcode = dns.RcodeNameError
		}
		return
	}
	rest, service := cutLast(rest)
	e := q.x.services[Key{namespace, service}]
	if e == nil || q.o.IgnoreEmpty && e.hasNoEndpoints() {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	if e.service.Spec.Type == v1.ServiceTypeExternalName {
		q.answerExternalName(e, rest)
		return
	}
	first, second := cutLast(rest)
	switch {
	case rest == "":
		q.answerServiceName(e)
	case first == "" && strings.HasPrefix(second, "_"):
		if !e.hasProtocol(second[1:]) {
			q.out.Rcode = dns.RcodeNameError
		}
	case first == "":
		q.answerEndpoint(e, second)
	case strings.HasPrefix(first, "_") && strings.HasPrefix(second, "_") && !strings.Contains(first, "."):
		q.answerPort(e, first[1:], second[1:])
	default:
		q.out.Rcode = dns.RcodeNameError
	}
}

// isHidden reports whether the Corefile excludes the names of the namespace.
func (q *question) isHidden(namespace string) bool {
	if len(q.o.Namespaces) == 0 {
		return false
	}
	for _, n := range q.o.Namespaces {
		if n == namespace {
			return false
		}
	}
	return true
}

// cutLast splits the last label off a name: "a.b.c" becomes "a.b" and "c".
func cutLast(name string) (rest, last string) {
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		return name[:i], name[i+1:]
	}
	return "", name
}

// hasNoEndpoints reports whether a Service that is neither headless nor of type ExternalName has no
// ready endpoint.
func (e *serviceEntry) hasNoEndpoints() bool {
	if e.headless || e.service.Spec.Type == v1.ServiceTypeExternalName {
		return false
	}
	for range e.readyEndpoints {
		return false
	}
	return true
}

// hasProtocol reports whether a named port of the Service has the protocol proto, which is in lower
// case.
func (e *serviceEntry) hasProtocol(proto string) bool {
	for i := range e.service.Spec.Ports {
		if p := &e.service.Spec.Ports[i]; p.Name != "" && strings.EqualFold(protocolName(p.Protocol), proto) {
			return true
		}
	}
	return false
}

func protocolName(p v1.Protocol) string {
	if p == "" {
		return string(v1.ProtocolTCP)
	}
	return string(p)
}

// answerExternalName adds the CNAME record of an ExternalName Service. rest is the part of the name
// before the Service's name; if it is not empty, the name does not exist.
func (q *question) answerExternalName(e *serviceEntry, rest string) {
	target := dns.Fqdn(strings.ToLower(e.service.Spec.ExternalName))
	if rest != "" || target == "." {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	q.addRecord(&dns.CNAME{Hdr: q.recordHeader(q.owner, dns.TypeCNAME), Target: target})
	if q.kind != dns.TypeCNAME {
		q.out.Alias = target
	}
}

// answerServiceName adds the address or SRV records for the name of a Service: its cluster IPs, or
// the endpoints of a headless Service.
func (q *question) answerServiceName(e *serviceEntry) {
	if q.kind == dns.TypeSRV {
		q.addServicePorts(e, nil)
		return
	}
	var all []netip.Addr
	if e.headless {
		seen := map[netip.Addr]struct{}{}
		for _, ep := range e.readyEndpoints {
			if all = appendNew(all, ep.Addresses, seen); len(all) >= q.most {
				q.out.Truncated = true
				break
			}
		}
	} else {
		e.forEachClusterIP(func(a netip.Addr) { all = append(all, a) })
	}
	q.addAddresses(all)
}

// appendNew appends to addresses those addresses in texts that are not in seen, and adds them to
// seen. An endpoint may temporarily be in two EndpointSlices.
func appendNew(addresses []netip.Addr, texts []string, seen map[netip.Addr]struct{}) []netip.Addr {
	for _, t := range texts {
		a, err := netip.ParseAddr(t)
		if err != nil {
			continue
		}
		if _, ok := seen[a]; !ok {
			seen[a] = struct{}{}
			addresses = append(addresses, a)
		}
	}
	return addresses
}

// answerEndpoint adds the records for HOST.SERVICE.NS, the name of an endpoint of a headless
// Service.
func (q *question) answerEndpoint(e *serviceEntry, host string) {
	found := false
	var all []netip.Addr
	seen := map[netip.Addr]struct{}{}
	e.forEachHost(host, q.o.PodNames, func(p *discoveryv1.EndpointSlice, ep *discoveryv1.Endpoint) {
		found = true
		if q.kind == dns.TypeSRV {
			for i := range p.Ports {
				q.addEndpointPort(e, ep, &p.Ports[i])
			}
			return
		}
		all = appendNew(all, ep.Addresses, seen)
	})
	if !found {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	if q.kind == dns.TypeSRV {
		q.setWeights()
		return
	}
	q.addAddresses(all)
}

// answerPort adds the SRV records for _PORT._PROTO.SERVICE.NS. The name exists if the Service has
// the port.
func (q *question) answerPort(e *serviceEntry, name, proto string) {
	for i := range e.service.Spec.Ports {
		p := &e.service.Spec.Ports[i]
		if p.Name != "" && strings.EqualFold(p.Name, name) && strings.EqualFold(protocolName(p.Protocol), proto) {
			if q.kind == dns.TypeSRV {
				q.addServicePorts(e, p)
			}
			return
		}
	}
	q.out.Rcode = dns.RcodeNameError
}

// addServicePorts adds the SRV records of one port of a Service, or of all its ports if port is
// nil.
func (q *question) addServicePorts(e *serviceEntry, port *v1.ServicePort) {
	if e.headless {
		for p, ep := range e.readyEndpoints {
			for i := range p.Ports {
				if port == nil || isServicePort(&p.Ports[i], port) {
					q.addEndpointPort(e, ep, &p.Ports[i])
				}
			}
			if len(q.out.Records) >= q.most {
				q.out.Truncated = true
				break
			}
		}
		q.setWeights()
		return
	}
	target := e.key.Name + "." + e.key.Namespace + ".svc." + q.zone
	for i := range e.service.Spec.Ports {
		p := &e.service.Spec.Ports[i]
		if port == nil || p == port {
			q.addRecord(&dns.SRV{Hdr: q.recordHeader(q.owner, dns.TypeSRV), Port: uint16(p.Port), Target: target})
		}
	}
	if len(q.out.Records) > 0 {
		e.forEachClusterIP(func(a netip.Addr) { q.out.Extra = append(q.out.Extra, q.addressRecord(target, a)) })
	}
	q.setWeights()
}

// isServicePort reports whether p, a port of an EndpointSlice, belongs to the given port of the
// Service.
func isServicePort(p *discoveryv1.EndpointPort, port *v1.ServicePort) bool {
	proto := ptr.Deref(p.Protocol, v1.ProtocolTCP)
	return p.Name != nil && *p.Name == port.Name && strings.EqualFold(string(proto), protocolName(port.Protocol))
}

// addEndpointPort adds the SRV record for the port p of the endpoint ep, and the endpoint's address
// records.
func (q *question) addEndpointPort(e *serviceEntry, ep *discoveryv1.Endpoint, p *discoveryv1.EndpointPort) {
	if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
		return
	}
	target := endpointHostName(ep, q.o.PodNames) + "." + e.key.Name + "." + e.key.Namespace + ".svc." + q.zone
	at := target + strconv.Itoa(int(*p.Port))
	if _, ok := q.seen[at]; ok {
		return // the same endpoint in another EndpointSlice
	}
	if q.seen == nil {
		q.seen = map[string]struct{}{}
	}
	q.seen[at] = struct{}{}
	q.addRecord(&dns.SRV{Hdr: q.recordHeader(q.owner, dns.TypeSRV), Port: uint16(*p.Port), Target: target})
	for _, t := range ep.Addresses {
		if a, err := netip.ParseAddr(t); err == nil {
			q.out.Extra = append(q.out.Extra, q.addressRecord(target, a))
		}
	}
}

// setWeights sets the same weight in all SRV records of the answer.
func (q *question) setWeights() {
	n := len(q.out.Records)
	if n == 0 {
		return
	}
	w := uint16(max(100/n, 1))
	for _, rr := range q.out.Records {
		rr.(*dns.SRV).Weight = w
	}
}

// answerPod adds the address record for A-B-C-D.NS.pod: the address in the name, whether or not
// such a pod exists.
func (q *question) answerPod(rest string) {
	rest, namespace := cutLast(rest)
	if q.isHidden(namespace) {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	if rest == "" {
		return
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(rest, "-", "."))
	if err != nil {
		a, err = netip.ParseAddr(strings.ReplaceAll(rest, "-", ":"))
	}
	if err != nil || strings.ContainsAny(rest, ".:%") {
		q.out.Rcode = dns.RcodeNameError
		return
	}
	q.addAddresses([]netip.Addr{a})
}

// addAddresses adds those address records to the answer that have the requested address family.
func (q *question) addAddresses(all []netip.Addr) {
	if q.kind != dns.TypeA && q.kind != dns.TypeAAAA {
		return
	}
	for _, a := range all {
		if a.Is4() == (q.kind == dns.TypeA) {
			q.addRecord(q.addressRecord(q.owner, a))
		}
	}
	Rotate(q.out.Records, q.turn)
}

// Rotate moves the first records of rrs to its end. The number of moved records is rotation modulo
// the number of records.
func Rotate(rrs []dns.RR, rotation uint32) {
	if len(rrs) < 2 {
		return
	}
	n := int(rotation % uint32(len(rrs)))
	if n == 0 {
		return
	}
	turned := append(append(make([]dns.RR, 0, len(rrs)), rrs[n:]...), rrs[:n]...)
	copy(rrs, turned)
}

func (q *question) addressRecord(owner string, a netip.Addr) dns.RR {
	if a.Is4() {
		b := a.As4()
		return &dns.A{Hdr: q.recordHeader(owner, dns.TypeA), A: net.IP(b[:])}
	}
	b := a.As16()
	return &dns.AAAA{Hdr: q.recordHeader(owner, dns.TypeAAAA), AAAA: net.IP(b[:])}
}

func (q *question) recordHeader(owner string, kind uint16) dns.RR_Header {
	return dns.RR_Header{Name: owner, Rrtype: kind, Class: dns.ClassINET, Ttl: q.o.TTL}
}

func (q *question) addRecord(rr dns.RR) { q.out.Records = append(q.out.Records, rr) }

// Reverse answers a question about a lower-case name in in-addr.arpa or ip6.arpa with PTR records.
// found is false if no Service or endpoint has the address. The PTR records contain names in zone.
func (x *Index) Reverse(o *Options, zone, owner, name string, kind uint16) (out Answer, found bool) {
	addr, ok := parseReverseName(name)
	if !ok {
		return out, false
	}
	q := question{x: x, o: o, zone: zone, owner: owner, kind: kind}
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, e := range x.byAddress[addr] {
		if q.isHidden(e.key.Namespace) {
			continue
		}
		found = true
		if kind != dns.TypePTR {
			continue
		}
		base := e.key.Name + "." + e.key.Namespace + ".svc." + zone
		if !e.headless {
			q.addRecord(&dns.PTR{Hdr: q.recordHeader(owner, dns.TypePTR), Ptr: base})
			continue
		}
		text := addr.String()
		for _, ep := range e.readyEndpoints {
			for _, a := range ep.Addresses {
				if a == text || sameAddress(a, addr) {
					q.addPointer(endpointHostName(ep, o.PodNames) + "." + base)
				}
			}
		}
	}
	return q.out, found
}

// sameAddress reports whether text is a textual form of the address a. Only IPv6 has several forms.
func sameAddress(text string, a netip.Addr) bool {
	if a.Is4() {
		return false
	}
	b, err := netip.ParseAddr(text)
	return err == nil && a == b
}

// addPointer adds a PTR record with the name target, unless the answer already contains it.
func (q *question) addPointer(target string) {
	for _, rr := range q.out.Records {
		if rr.(*dns.PTR).Ptr == target {
			return
		}
	}
	q.addRecord(&dns.PTR{Hdr: q.recordHeader(q.owner, dns.TypePTR), Ptr: target})
}

// ReverseAddress returns the address of a lower-case name in in-addr.arpa or ip6.arpa. It returns
// false for a name that is not a complete address.
func ReverseAddress(name string) (netip.Addr, bool) { return parseReverseName(name) }

// parseReverseName returns the address of a lower-case name in in-addr.arpa or ip6.arpa. It returns
// false for a name that is not a complete address.
func parseReverseName(name string) (netip.Addr, bool) {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		var b [4]byte
		for i := range b {
			var label string
			if rest, label = cutLast(rest); !parseOctet(label, &b[i]) {
				return netip.Addr{}, false
			}
		}
		return netip.AddrFrom4(b), rest == ""
	}
	rest, ok := strings.CutSuffix(name, ".ip6.arpa.")
	if !ok || len(rest) != 63 {
		return netip.Addr{}, false
	}
	var b [16]byte
	for i := range 32 {
		at := 62 - 2*i
		d := strings.IndexByte("0123456789abcdef", rest[at])
		if d < 0 || at > 0 && rest[at-1] != '.' {
			return netip.Addr{}, false
		}
		b[i/2] = b[i/2]<<4 | byte(d)
	}
	return netip.AddrFrom16(b), true
}

// parseOctet parses s, a number from 0 to 255 without leading zeros, into octet. It returns false
// if s is not such a number.
func parseOctet(s string, octet *byte) bool {
	if s == "" || len(s) > 3 || len(s) > 1 && s[0] == '0' {
		return false
	}
	n := 0
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
		n = 10*n + int(c-'0')
	}
	*octet = byte(n)
	return n < 256
}
