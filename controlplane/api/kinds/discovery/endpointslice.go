// Package discovery describes the kinds of the API group discovery.k8s.io.
package discovery

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// EndpointSliceKind returns the definition of the kind EndpointSlice.
func EndpointSliceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: discoveryv1.SchemeGroupVersion, Kind: "EndpointSlice", Plural: "endpointslices", Singular: "endpointslice",
	}, func(l *discoveryv1.EndpointSliceList) *[]discoveryv1.EndpointSlice { return &l.Items })
	k.Default = builder.Default(func(e *discoveryv1.EndpointSlice) {
		for i := range e.Ports {
			builder.SetDefaultPtr(&e.Ports[i].Name, "")
			builder.SetDefaultPtr(&e.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	})
	// Fields that v1 kept from v1beta1 cannot be written.
	old := func(e *discoveryv1.EndpointSlice) {
		for i := range e.Endpoints {
			e.Endpoints[i].DeprecatedTopology = nil
		}
	}
	k.PrepareCreate = builder.Default(func(e *discoveryv1.EndpointSlice) {
		old(e)
		e.Generation = 1
	})
	k.PrepareUpdate = func(o, was api.Object) {
		obj, stored := o.(*discoveryv1.EndpointSlice), was.(*discoveryv1.EndpointSlice)
		old(obj)
		obj.Generation = stored.Generation
		if !fieldrules.SemanticEqual(obj.Ports, stored.Ports) || !fieldrules.SemanticEqual(obj.Endpoints,
			stored.Endpoints) {
			obj.Generation++
		}
	}
	builder.AddValidation(k, ValidateEndpointSlice)
	builder.AddUpdateValidation(k, func(obj, old *discoveryv1.EndpointSlice) field.ErrorList {
		return fieldrules.Unchanged(obj.AddressType, old.AddressType, field.NewPath("addressType"))
	})
	k.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("AddressType"), builder.StringColumn("Ports"),
		builder.StringColumn("Endpoints"), builder.AgeColumn)
	k.Row = builder.Row(func(e *discoveryv1.EndpointSlice, now time.Time) []any {
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
		return []any{e.Name, string(e.AddressType), core.FirstOf(ports, " + %d more...", builder.Unset),
			core.FirstOf(addresses, " + %d more...", builder.Unset), builder.Age(e, now)}
	})
	return k
}

const (
	maxSliceEndpoints = 1000
	maxSliceAddresses = 100
	maxSlicePorts     = 20000
	maxSliceHints     = 8 // hints of an endpoint: zones, or nodes
)

// ValidateEndpointSlice returns the errors in an EndpointSlice.
func ValidateEndpointSlice(e *discoveryv1.EndpointSlice) field.ErrorList {
	errs := fieldrules.OneOf(e.AddressType, field.NewPath("addressType"),
		discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	at := field.NewPath("endpoints")
	endpoints := e.Endpoints
	if len(endpoints) > maxSliceEndpoints {
		errs = append(errs, field.TooMany(at, len(endpoints), maxSliceEndpoints))
		endpoints = nil // too many endpoints are not validated
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
			errs = append(errs, fieldrules.Invalid(at.Index(i).Child("nodeName"), *p.NodeName,
				apivalidation.NameIsDNSSubdomain(*p.NodeName, false))...)
		}
		if p.Hostname != nil {
			errs = append(errs, fieldrules.Invalid(at.Index(i).Child("hostname"), *p.Hostname,
				validation.IsDNS1123Label(*p.Hostname))...)
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

// validateHinted validates the names of the zones or nodes in an endpoint's hints with rule.
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
		errs = append(errs, fieldrules.Invalid(here, name, rule(name))...)
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
		if name := fieldrules.Deref(p.Name); name != "" {
			errs = append(errs, fieldrules.Invalid(here.Child("name"), name, validation.IsDNS1123Label(name))...)
		}
		if p.AppProtocol != nil {
			errs = append(errs, fieldrules.Invalid(here.Child("appProtocol"), *p.AppProtocol,
				validation.IsQualifiedName(*p.AppProtocol))...)
		}
		if name := fieldrules.Deref(p.Name); seen[name] {
			errs = append(errs, field.Duplicate(here.Child("name"), name))
		} else {
			seen[name] = true
		}
		if p.Protocol == nil {
			errs = append(errs, field.Required(here.Child("protocol"), ""))
		} else {
			errs = append(errs, fieldrules.Supported(*p.Protocol, here.Child("protocol"), corev1.ProtocolSCTP,
				corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		}
		// Kubernetes accepts any number here. Clients of the endpoints skip numbers that are not
		// ports.
	}
	return errs
}

// sliceAddress validates an address by the address type of the slice. For an unknown type, which is
// an error itself, any address is valid.
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
	return append(errs, core.NonSpecial(a, at)...)
}
