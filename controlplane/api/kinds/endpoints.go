package kinds

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// shownEndpoints is how many endpoints a row lists before it counts the rest.
const shownEndpoints = 3

func endpointsKind() *api.Kind {
	k := newKind[corev1.Endpoints, corev1.EndpointsList](names{
		gv: corev1.SchemeGroupVersion, kind: "Endpoints", plural: "endpoints", singular: "endpoints", short: []string{"ep"},
	})
	k.Default = defaults(func(e *corev1.Endpoints) {
		for i := range e.Subsets {
			for j := range e.Subsets[i].Ports {
				setDefault(&e.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
			}
		}
	})
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
	k := newKind[discoveryv1.EndpointSlice, discoveryv1.EndpointSliceList](names{
		gv: discoveryv1.SchemeGroupVersion, kind: "EndpointSlice", plural: "endpointslices", singular: "endpointslice",
	})
	k.Default = defaults(func(e *discoveryv1.EndpointSlice) {
		for i := range e.Ports {
			setDefaultPtr(&e.Ports[i].Name, "")
			setDefaultPtr(&e.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	})
	k.PrepareCreate = defaults(func(e *discoveryv1.EndpointSlice) { e.Generation = 1 })
	k.PrepareUpdate = func(o, was api.Object) {
		obj, old := o.(*discoveryv1.EndpointSlice), was.(*discoveryv1.EndpointSlice)
		obj.Generation = old.Generation
		if !semanticEqual(obj.Ports, old.Ports) || !semanticEqual(obj.Endpoints, old.Endpoints) {
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

const (
	maxSliceEndpoints = 1000
	maxSliceAddresses = 100
)

func validateEndpointSlice(e *discoveryv1.EndpointSlice) field.ErrorList {
	errs := oneOf(e.AddressType, field.NewPath("addressType"),
		discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	at := field.NewPath("endpoints")
	if len(e.Endpoints) > maxSliceEndpoints {
		errs = append(errs, field.TooMany(at, len(e.Endpoints), maxSliceEndpoints))
	}
	for i, p := range e.Endpoints {
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
	}
	seen := map[string]bool{}
	for i, p := range e.Ports {
		here := field.NewPath("ports").Index(i)
		if name := val(p.Name); seen[name] {
			errs = append(errs, field.Duplicate(here.Child("name"), name))
		} else {
			seen[name] = true
		}
		errs = append(errs, oneOf(val(p.Protocol), here.Child("protocol"), corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)...)
		if p.Port != nil {
			errs = append(errs, invalid(here.Child("port"), *p.Port, validation.IsValidPortNum(int(*p.Port)))...)
		}
	}
	return errs
}

func sliceAddress(t discoveryv1.AddressType, a string, at *field.Path) field.ErrorList {
	if t == discoveryv1.AddressTypeFQDN {
		return validation.IsFullyQualifiedDomainName(at, a)
	}
	if errs := validation.IsValidIP(at, a); len(errs) > 0 {
		return errs
	}
	if is4 := net.ParseIP(a).To4() != nil; is4 != (t == discoveryv1.AddressTypeIPv4) {
		return field.ErrorList{field.Invalid(at, a, fmt.Sprintf("must be an %s address", t))}
	}
	return nil
}
