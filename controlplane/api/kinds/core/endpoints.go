package core

import (
	"net"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// EndpointsKind returns the definition of the kind Endpoints.
func EndpointsKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "Endpoints", CreateOnUpdate: true, Plural: "endpoints",
		Singular: "endpoints", Short: []string{"ep"},
	}, func(l *corev1.EndpointsList) *[]corev1.Endpoints { return &l.Items })
	k.Writes.Default = builder.Default(func(e *corev1.Endpoints) {
		for i := range e.Subsets {
			for j := range e.Subsets[i].Ports {
				builder.SetDefault(&e.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
			}
		}
	})
	builder.AddValidation(k, validateEndpoints)
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Endpoints"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(e *corev1.Endpoints, now time.Time) []any {
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
		return []any{e.Name, FormatAddresses(all, " + %d more...", builder.None), builder.Age(e, now)}
	})
	return k
}

func validateEndpoints(e *corev1.Endpoints) field.ErrorList {
	var errs field.ErrorList
	for i := range e.Subsets {
		s, fldPath := &e.Subsets[i], field.NewPath("subsets").Index(i)
		if len(s.Addresses)+len(s.NotReadyAddresses) == 0 {
			errs = append(errs, field.Required(fldPath, "must specify `addresses` or `notReadyAddresses`"))
		}
		for j := range s.Addresses {
			errs = append(errs, validateEndpointAddress(&s.Addresses[j], fldPath.Child("addresses").Index(j))...)
		}
		for j := range s.NotReadyAddresses {
			errs = append(errs, validateEndpointAddress(&s.NotReadyAddresses[j],
				fldPath.Child("notReadyAddresses").Index(j))...)
		}
		for j := range s.Ports {
			errs = append(errs, validateEndpointPort(&s.Ports[j], len(s.Ports) > 1, fldPath.Child("ports").Index(j))...)
		}
	}
	return errs
}

func validateEndpointAddress(a *corev1.EndpointAddress, fldPath *field.Path) field.ErrorList {
	errs := validation.IsValidIP(fldPath.Child("ip"), a.IP)
	ip := ValidateNonSpecialIP(a.IP, fldPath.Child("ip"))
	if a.Hostname != "" {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("hostname"), a.Hostname,
			validation.IsDNS1123Label(a.Hostname))...)
	}
	if a.NodeName != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("nodeName"), *a.NodeName,
			apivalidation.NameIsDNSSubdomain(*a.NodeName, false))...)
	}
	return append(errs, ip...)
}

func validateEndpointPort(p *corev1.EndpointPort, named bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case p.Name != "":
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("name"), p.Name,
			validation.IsDNS1123Label(p.Name))...)
	case named:
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	}
	errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("port"), p.Port,
		validation.IsValidPortNum(int(p.Port)))...)
	if p.Protocol == "" {
		errs = append(errs, field.Required(fldPath.Child("protocol"), ""))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(p.Protocol, fldPath.Child("protocol"), corev1.ProtocolSCTP,
			corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	}
	if p.AppProtocol != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("appProtocol"), *p.AppProtocol,
			validation.IsQualifiedName(*p.AppProtocol))...)
	}
	return errs
}
