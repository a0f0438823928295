package kinds

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// shownEndpoints is how many endpoints a row lists before it counts the rest.
const shownEndpoints = 3

func endpointsKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "Endpoints", putCreates: true, plural: "endpoints", singular: "endpoints", short: []string{"ep"},
	}, func(l *corev1.EndpointsList) *[]corev1.Endpoints { return &l.Items })
	k.Default = defaults(func(e *corev1.Endpoints) {
		for i := range e.Subsets {
			for j := range e.Subsets[i].Ports {
				setDefault(&e.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
			}
		}
	})
	check(k, validateEndpoints)
	k.Columns = columns(nameCol, col("Endpoints"), ageCol)
	k.Row = row(func(e *corev1.Endpoints, now time.Time) []any {
		var all []string
		for _, s := range e.Subsets {
			for _, p := range s.Ports {
				for _, a := range s.Addresses {
					all = append(all, net.JoinHostPort(a.IP, strconv.Itoa(int(p.Port))))
				}
			}
			if len(s.Ports) == 0 {
				for _, a := range s.Addresses {
					all = append(all, a.IP)
				}
			}
		}
		return []any{e.Name, firstOf(all, " + %d more...", none), age(e, now)}
	})
	return k
}

func endpointSliceKind() *api.Kind {
	k := newKind(names{
		gv: discoveryv1.SchemeGroupVersion, kind: "EndpointSlice", plural: "endpointslices", singular: "endpointslice",
	}, func(l *discoveryv1.EndpointSliceList) *[]discoveryv1.EndpointSlice { return &l.Items })
	k.Default = defaults(func(e *discoveryv1.EndpointSlice) {
		for i := range e.Ports {
			setDefaultPtr(&e.Ports[i].Name, "")
			setDefaultPtr(&e.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	})
	// What v1 carries over from v1beta1 cannot be written in it.
	old := func(e *discoveryv1.EndpointSlice) {
		for i := range e.Endpoints {
			e.Endpoints[i].DeprecatedTopology = nil
		}
	}
	k.PrepareCreate = defaults(func(e *discoveryv1.EndpointSlice) {
		old(e)
		e.Generation = 1
	})
	k.PrepareUpdate = func(o, was api.Object) {
		obj, stored := o.(*discoveryv1.EndpointSlice), was.(*discoveryv1.EndpointSlice)
		old(obj)
		obj.Generation = stored.Generation
		if !semanticEqual(obj.Ports, stored.Ports) || !semanticEqual(obj.Endpoints, stored.Endpoints) {
			obj.Generation++
		}
	}
	check(k, validateEndpointSlice)
	checkUpdate(k, func(obj, old *discoveryv1.EndpointSlice) field.ErrorList {
		return sameOr(obj.AddressType, old.AddressType, field.NewPath("addressType"))
	})
	k.Columns = columns(nameCol, col("AddressType"), col("Ports"), col("Endpoints"), ageCol)
	k.Row = row(func(e *discoveryv1.EndpointSlice, now time.Time) []any {
		var ports, addresses []string
		for _, p := range e.Ports {
			if p.Port == nil {
				ports = append(ports, "*")
				continue
			}
			ports = append(ports, strconv.Itoa(int(*p.Port)))
		}
		for _, p := range e.Endpoints {
			addresses = append(addresses, p.Addresses...)
		}
		return []any{e.Name, string(e.AddressType), firstOf(ports, " + %d more...", unset),
			firstOf(addresses, " + %d more...", unset), age(e, now)}
	})
	return k
}

// firstOf lists the first few of all and counts the rest.
func firstOf(all []string, more, nothing string) string {
	if len(all) == 0 {
		return nothing
	}
	if len(all) <= shownEndpoints {
		return strings.Join(all, ",")
	}
	return strings.Join(all[:shownEndpoints], ",") + fmt.Sprintf(more, len(all)-shownEndpoints)
}

func validateEndpoints(e *corev1.Endpoints) field.ErrorList {
	var errs field.ErrorList
	for i := range e.Subsets {
		s, at := &e.Subsets[i], field.NewPath("subsets").Index(i)
		if len(s.Addresses)+len(s.NotReadyAddresses) == 0 {
			errs = append(errs, field.Required(at, "must specify `addresses` or `notReadyAddresses`"))
		}
		for j := range s.Addresses {
			errs = append(errs, validateEndpointAddress(&s.Addresses[j], at.Child("addresses").Index(j))...)
		}
		for j := range s.NotReadyAddresses {
			errs = append(errs, validateEndpointAddress(&s.NotReadyAddresses[j], at.Child("notReadyAddresses").Index(j))...)
		}
		for j := range s.Ports {
			errs = append(errs, validateEndpointPort(&s.Ports[j], len(s.Ports) > 1, at.Child("ports").Index(j))...)
		}
	}
	return errs
}

func validateEndpointAddress(a *corev1.EndpointAddress, at *field.Path) field.ErrorList {
	errs := validation.IsValidIP(at.Child("ip"), a.IP)
	ip := nonSpecial(a.IP, at.Child("ip"))
	if a.Hostname != "" {
		errs = append(errs, invalid(at.Child("hostname"), a.Hostname, validation.IsDNS1123Label(a.Hostname))...)
	}
	if a.NodeName != nil {
		errs = append(errs, invalid(at.Child("nodeName"), *a.NodeName, apivalidation.NameIsDNSSubdomain(*a.NodeName, false))...)
	}
	return append(errs, ip...)
}

func validateEndpointPort(p *corev1.EndpointPort, named bool, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case p.Name != "":
		errs = append(errs, invalid(at.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))...)
	case named:
		errs = append(errs, field.Required(at.Child("name"), ""))
	}
	errs = append(errs, invalid(at.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))...)
	if p.Protocol == "" {
		errs = append(errs, field.Required(at.Child("protocol"), ""))
	} else {
		errs = append(errs, listed(p.Protocol, at.Child("protocol"), corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	}
	if p.AppProtocol != nil {
		errs = append(errs, invalid(at.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))...)
	}
	return errs
}

const (
	maxSliceEndpoints = 1000
	maxSliceAddresses = 100
	maxSlicePorts     = 20000
	maxSliceHints     = 8 // zones of an endpoint, and nodes
)

func validateEndpointSlice(e *discoveryv1.EndpointSlice) field.ErrorList {
	errs := oneOf(e.AddressType, field.NewPath("addressType"),
		discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	at := field.NewPath("endpoints")
	endpoints := e.Endpoints
	if len(endpoints) > maxSliceEndpoints {
		errs = append(errs, field.TooMany(at, len(endpoints), maxSliceEndpoints))
		endpoints = nil // so many are not looked at
	}
	for i, p := range endpoints {
		here := at.Index(i).Child("addresses")
		switch n := len(p.Addresses); {
		case n == 0:
			errs = append(errs, field.Required(here, "must contain at least 1 address"))
		case n > maxSliceAddresses:
			errs = append(errs, field.TooMany(here, n, maxSliceAddresses))
		}
		for j, a := range p.Addresses {
			errs = append(errs, sliceAddress(e.AddressType, a, here.Index(j))...)
		}
		if p.NodeName != nil {
			errs = append(errs, invalid(at.Index(i).Child("nodeName"), *p.NodeName, apivalidation.NameIsDNSSubdomain(*p.NodeName, false))...)
		}
		if p.Hostname != nil {
			errs = append(errs, invalid(at.Index(i).Child("hostname"), *p.Hostname, validation.IsDNS1123Label(*p.Hostname))...)
		}
		if p.Hints != nil {
			errs = append(errs, validateHints(p.Hints, at.Index(i).Child("hints"))...)
		}
	}
	return append(errs, validateSlicePorts(e.Ports, field.NewPath("ports"))...)
}

func validateHints(h *discoveryv1.EndpointHints, at *field.Path) field.ErrorList {
	var zones, nodes []string
	for _, z := range h.ForZones {
		zones = append(zones, z.Name)
	}
	for _, n := range h.ForNodes {
		nodes = append(nodes, n.Name)
	}
	errs := validateHinted(zones, at.Child("forZones"), validation.IsValidLabelValue)
	return append(errs, validateHinted(nodes, at.Child("forNodes"), func(n string) []string {
		return apivalidation.NameIsDNSSubdomain(n, false)
	})...)
}

// validateHinted judges the zones or the nodes that an endpoint is for.
func validateHinted(names []string, at *field.Path, rule func(string) []string) field.ErrorList {
	if len(names) > maxSliceHints {
		return field.ErrorList{field.TooMany(at, len(names), maxSliceHints)}
	}
	var errs field.ErrorList
	for i, name := range names {
		here := at.Index(i).Child("name")
		if slices.Contains(names[:i], name) {
			errs = append(errs, field.Duplicate(here, name))
		}
		errs = append(errs, invalid(here, name, rule(name))...)
	}
	return errs
}

func validateSlicePorts(ports []discoveryv1.EndpointPort, at *field.Path) field.ErrorList {
	if len(ports) > maxSlicePorts {
		return field.ErrorList{field.TooMany(at, len(ports), maxSlicePorts)}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, p := range ports {
		here := at.Index(i)
		if name := val(p.Name); name != "" {
			errs = append(errs, invalid(here.Child("name"), name, validation.IsDNS1123Label(name))...)
		}
		if p.AppProtocol != nil {
			errs = append(errs, invalid(here.Child("appProtocol"), *p.AppProtocol, validation.IsQualifiedName(*p.AppProtocol))...)
		}
		if name := val(p.Name); seen[name] {
			errs = append(errs, field.Duplicate(here.Child("name"), name))
		} else {
			seen[name] = true
		}
		if p.Protocol == nil {
			errs = append(errs, field.Required(here.Child("protocol"), ""))
		} else {
			errs = append(errs, listed(*p.Protocol, here.Child("protocol"), corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		}
		// Kubernetes accepts any number here. Whoever connects to the endpoints skips numbers that are not ports.
	}
	return errs
}

// sliceAddress judges an address by the type of the slice; of an unknown type, which is refused itself, any will do.
func sliceAddress(t discoveryv1.AddressType, a string, at *field.Path) field.ErrorList {
	switch t {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
	case discoveryv1.AddressTypeFQDN:
		return validation.IsFullyQualifiedDomainName(at, a)
	default:
		return nil
	}
	if errs := validation.IsValidIP(at, a); len(errs) > 0 {
		return errs
	}
	var errs field.ErrorList
	if is4 := net.ParseIP(a).To4() != nil; is4 != (t == discoveryv1.AddressTypeIPv4) {
		errs = append(errs, field.Invalid(at, a, fmt.Sprintf("must be an %s address", t)))
	}
	return append(errs, nonSpecial(a, at)...)
}

// nonSpecial refuses addresses that mean something else on each machine: nobody is to be sent to them.
func nonSpecial(a string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	refuse := func(special bool, why string) {
		if special {
			errs = append(errs, field.Invalid(at, a, why))
		}
	}
	ip := net.ParseIP(a)
	if ip == nil {
		return field.ErrorList{field.Invalid(at, a, "must be a valid IP address")}
	}
	refuse(ip.IsUnspecified(), fmt.Sprintf("may not be unspecified (%v)", a))
	refuse(ip.IsLoopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)")
	refuse(ip.IsLinkLocalUnicast(), "may not be in the link-local range (169.254.0.0/16, fe80::/10)")
	refuse(ip.IsLinkLocalMulticast(), "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
	return errs
}
