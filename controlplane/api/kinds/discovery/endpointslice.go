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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// EndpointSliceKind returns the definition of the kind EndpointSlice.
func EndpointSliceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: discoveryv1.SchemeGroupVersion, Kind: "EndpointSlice", Plural: "endpointslices",
		Singular: "endpointslice",
	}, func(l *discoveryv1.EndpointSliceList) *[]discoveryv1.EndpointSlice { return &l.Items })
	k.Writes.Default = builder.Default(func(e *discoveryv1.EndpointSlice) {
		for i := range e.Ports {
			builder.SetDefaultPtr(&e.Ports[i].Name, "")
			builder.SetDefaultPtr(&e.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	})
	// clients cannot write the fields that v1 has kept from v1beta1
	old := func(e *discoveryv1.EndpointSlice) {
		for i := range e.Endpoints {
			e.Endpoints[i].DeprecatedTopology = nil
		}
	}
	k.Writes.PrepareCreate = builder.Default(func(e *discoveryv1.EndpointSlice) {
		old(e)
		e.Generation = 1
	})
	k.Writes.PrepareUpdate = func(o, was api.Object) {
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
		return fieldrules.ValidateUnchanged(obj.AddressType, old.AddressType, field.NewPath("addressType"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("AddressType"),
		builder.StringColumn("Ports"),
		builder.StringColumn("Endpoints"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(e *discoveryv1.EndpointSlice, now time.Time) []any {
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
		return []any{e.Name, string(e.AddressType), core.FormatAddresses(ports, " + %d more...", builder.Unset),
			core.FormatAddresses(addresses, " + %d more...", builder.Unset), builder.Age(e, now)}
	})
	return k
}

const (
	maxSliceEndpoints = 1000
	maxSliceAddresses = 100
	maxSlicePorts     = 20000
	maxSliceHints     = 8 // maximum number of zones, and of nodes, in the hints of an endpoint
)

// ValidateEndpointSlice returns the errors in an EndpointSlice.
func ValidateEndpointSlice(e *discoveryv1.EndpointSlice) field.ErrorList {
	errs := fieldrules.ValidateOneOf(e.AddressType, field.NewPath("addressType"),
		discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	fldPath := field.NewPath("endpoints")
	endpoints := e.Endpoints
	if len(endpoints) > maxSliceEndpoints {
		errs = append(errs, field.TooMany(fldPath, len(endpoints), maxSliceEndpoints))
		endpoints = nil // too many endpoints are not validated
	}
	for i, p := range endpoints {
		here := fldPath.Index(i).Child("addresses")
		switch n := len(p.Addresses); {
		case n == 0:
			errs = append(errs, field.Required(here, "must contain at least 1 address"))
		case n > maxSliceAddresses:
			errs = append(errs, field.TooMany(here, n, maxSliceAddresses))
		}
		for j, a := range p.Addresses {
			errs = append(errs, validateSliceAddress(e.AddressType, a, here.Index(j))...)
		}
		if p.NodeName != nil {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Index(i).Child("nodeName"), *p.NodeName,
				apivalidation.NameIsDNSSubdomain(*p.NodeName, false))...)
		}
		if p.Hostname != nil {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Index(i).Child("hostname"), *p.Hostname,
				validation.IsDNS1123Label(*p.Hostname))...)
		}
		if p.Hints != nil {
			errs = append(errs, validateHints(p.Hints, fldPath.Index(i).Child("hints"))...)
		}
	}
	return append(errs, validateSlicePorts(e.Ports, field.NewPath("ports"))...)
}

func validateHints(h *discoveryv1.EndpointHints, fldPath *field.Path) field.ErrorList {
	var zones, nodes []string
	for _, z := range h.ForZones {
		zones = append(zones, z.Name)
	}
	for _, n := range h.ForNodes {
		nodes = append(nodes, n.Name)
	}
	errs := validateHinted(zones, fldPath.Child("forZones"), validation.IsValidLabelValue)
	return append(errs, validateHinted(nodes, fldPath.Child("forNodes"), func(n string) []string {
		return apivalidation.NameIsDNSSubdomain(n, false)
	})...)
}

// validateHinted validates the names of the zones or nodes in an endpoint's hints. rule returns the
// errors of one name.
func validateHinted(names []string, fldPath *field.Path, rule func(string) []string) field.ErrorList {
	if len(names) > maxSliceHints {
		return field.ErrorList{field.TooMany(fldPath, len(names), maxSliceHints)}
	}
	var errs field.ErrorList
	for i, name := range names {
		here := fldPath.Index(i).Child("name")
		if slices.Contains(names[:i], name) {
			errs = append(errs, field.Duplicate(here, name))
		}
		errs = append(errs, fieldrules.InvalidErrors(here, name, rule(name))...)
	}
	return errs
}

func validateSlicePorts(ports []discoveryv1.EndpointPort, fldPath *field.Path) field.ErrorList {
	if len(ports) > maxSlicePorts {
		return field.ErrorList{field.TooMany(fldPath, len(ports), maxSlicePorts)}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, p := range ports {
		here := fldPath.Index(i)
		if name := ptr.Deref(p.Name, ""); name != "" {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), name, validation.IsDNS1123Label(name))...)
		}
		if p.AppProtocol != nil {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("appProtocol"), *p.AppProtocol,
				validation.IsQualifiedName(*p.AppProtocol))...)
		}
		if name := ptr.Deref(p.Name, ""); seen[name] {
			errs = append(errs, field.Duplicate(here.Child("name"), name))
		} else {
			seen[name] = true
		}
		if p.Protocol == nil {
			errs = append(errs, field.Required(here.Child("protocol"), ""))
		} else {
			errs = append(errs, fieldrules.ValidateSupported(*p.Protocol, here.Child("protocol"), corev1.ProtocolSCTP,
				corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		}
		// Kubernetes accepts any number here. Clients of the endpoints ignore numbers that are not
		// valid ports.
	}
	return errs
}

// validateSliceAddress validates an address of a slice with the given address type. If the type is
// unknown, which is a separate error, any address is valid.
func validateSliceAddress(addressType discoveryv1.AddressType, address string, fldPath *field.Path) field.ErrorList {
	switch addressType {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
	case discoveryv1.AddressTypeFQDN:
		return validation.IsFullyQualifiedDomainName(fldPath, address)
	default:
		return nil
	}
	if errs := validation.IsValidIP(fldPath, address); len(errs) > 0 {
		return errs
	}
	var errs field.ErrorList
	if is4 := net.ParseIP(address).To4() != nil; is4 != (addressType == discoveryv1.AddressTypeIPv4) {
		errs = append(errs, field.Invalid(fldPath, address, fmt.Sprintf("must be an %s address", addressType)))
	}
	return append(errs, core.ValidateNonSpecialIP(address, fldPath)...)
}
