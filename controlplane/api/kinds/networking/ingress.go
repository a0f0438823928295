// Package networking describes the kinds of the API group networking.k8s.io.
package networking

import (
	"fmt"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// IngressClassAnnotation is the annotation that the field spec.ingressClassName has replaced.
const IngressClassAnnotation = "kubernetes.io/ingress.class"

// IngressKind returns the definition of the kind Ingress.
func IngressKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: networkingv1.SchemeGroupVersion, Kind: "Ingress", Plural: "ingresses", Singular: "ingress",
		Short: []string{"ing"},
	}, func(l *networkingv1.IngressList) *[]networkingv1.Ingress { return &l.Items })
	builder.SeparateStatus(k, func(o *networkingv1.Ingress) *networkingv1.IngressStatus { return &o.Status },
		builder.Accessors[*networkingv1.Ingress]{
			Spec:     func(i *networkingv1.Ingress) any { return i.Spec },
			CopySpec: func(obj, old *networkingv1.Ingress) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *networkingv1.Ingress) {
				obj.Status = networkingv1.IngressStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.AddValidation(k, func(i *networkingv1.Ingress) field.ErrorList {
		return validateIngress(&i.Spec,
			field.NewPath("spec"))
	})
	k.Validation.Create = builder.CreateValidation(func(i *networkingv1.Ingress) field.ErrorList {
		class, set := i.Annotations[IngressClassAnnotation]
		if !set || i.Spec.IngressClassName == nil || class == *i.Spec.IngressClassName {
			return nil
		}
		return field.ErrorList{field.Invalid(field.NewPath("annotations").Child(IngressClassAnnotation), class,
			"must match `ingressClassName` when both are specified")}
	})
	builder.AddStatusValidation(k, func(obj, old *networkingv1.Ingress) field.ErrorList {
		return validateIngressStatus(obj.Status.LoadBalancer.Ingress, old.Status.LoadBalancer.Ingress)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Class"), builder.StringColumn("Hosts"),
		builder.StringColumn("Address"), builder.StringColumn("Ports"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(i *networkingv1.Ingress, now time.Time) []any {
		class, ports := builder.None, "80"
		if i.Spec.IngressClassName != nil {
			class = *i.Spec.IngressClassName
		}
		if len(i.Spec.TLS) > 0 {
			ports = "80, 443"
		}
		return []any{i.Name, class, ingressHosts(i.Spec.Rules), ingressAddress(i.Status.LoadBalancer.Ingress), ports,
			builder.Age(i, now)}
	})
	return k
}

// shownHosts is the maximum number of hosts in a table cell. The cell then contains the number of
// the remaining hosts.
const shownHosts = 3

func ingressHosts(rules []networkingv1.IngressRule) string {
	var hosts []string
	for _, r := range rules {
		if r.Host != "" && len(hosts) < shownHosts {
			hosts = append(hosts, r.Host)
		}
	}
	switch {
	case len(hosts) == 0:
		return "*"
	case len(hosts) == shownHosts && len(rules) > shownHosts:
		return fmt.Sprintf("%s + %d more...", strings.Join(hosts, ","), len(rules)-shownHosts)
	}
	return strings.Join(hosts, ",")
}

func ingressAddress(list []networkingv1.IngressLoadBalancerIngress) string {
	var all []string
	for _, in := range list {
		if a := in.IP; a != "" {
			all = append(all, a)
		} else if in.Hostname != "" {
			all = append(all, in.Hostname)
		}
	}
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ",")
}

func validateIngress(s *networkingv1.IngressSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(s.Rules) == 0 && s.DefaultBackend == nil {
		errs = append(errs, field.Invalid(spec, s.Rules, "either `defaultBackend` or `rules` must be specified"))
	}
	if s.DefaultBackend != nil {
		errs = append(errs, validateIngressBackend(s.DefaultBackend, spec.Child("defaultBackend"))...)
	}
	for i, r := range s.Rules {
		errs = append(errs, validateIngressRule(&r, spec.Child("rules").Index(i))...)
	}
	for i, t := range s.TLS {
		fldPath := spec.Child("tls").Index(i)
		for j, h := range t.Hosts {
			errs = append(errs, validateIngressHost(h, fldPath.Child("hosts").Index(j))...)
		}
		if t.SecretName != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("secretName"), t.SecretName,
				apivalidation.NameIsDNSSubdomain(t.SecretName, false))...)
		}
	}
	if c := s.IngressClassName; c != nil {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("ingressClassName"), *c,
			apivalidation.NameIsDNSSubdomain(*c, false))...)
	}
	return errs
}

func validateIngressHost(host string, fldPath *field.Path) field.ErrorList {
	if strings.Contains(host, "*") {
		return fieldrules.InvalidErrors(fldPath, host, validation.IsWildcardDNS1123Subdomain(host))
	}
	return fieldrules.InvalidErrors(fldPath, host, validation.IsDNS1123Subdomain(host))
}

func validateIngressRule(r *networkingv1.IngressRule, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if r.Host != "" {
		if isIP(r.Host) {
			errs = append(errs, field.Invalid(fldPath.Child("host"), r.Host, "must be a DNS name, not an IP address"))
		}
		errs = append(errs, validateIngressHost(r.Host, fldPath.Child("host"))...)
	}
	if r.HTTP == nil {
		return errs
	}
	paths := fldPath.Child("http", "paths")
	if len(r.HTTP.Paths) == 0 {
		errs = append(errs, field.Required(paths, ""))
	}
	for i, p := range r.HTTP.Paths {
		errs = append(errs, validateIngressPath(&p, paths.Index(i))...)
	}
	return errs
}

func validateIngressPath(p *networkingv1.HTTPIngressPath, fldPath *field.Path) field.ErrorList {
	if p.PathType == nil {
		return field.ErrorList{field.Required(fldPath.Child("pathType"), "pathType must be specified")}
	}
	var errs field.ErrorList
	wrong := func(why string) { errs = append(errs, field.Invalid(fldPath.Child("path"), p.Path, why)) }
	absolute := strings.HasPrefix(p.Path, "/")
	switch *p.PathType {
	case networkingv1.PathTypeExact, networkingv1.PathTypePrefix:
		if !absolute {
			wrong("must be an absolute path")
		}
		for _, part := range []string{"//", "/./", "/../", "%2f", "%2F"} {
			if strings.Contains(p.Path, part) {
				wrong(fmt.Sprintf("must not contain '%s'", part))
			}
		}
		for _, end := range []string{"/..", "/."} {
			if strings.HasSuffix(p.Path, end) {
				wrong(fmt.Sprintf("cannot end with '%s'", end))
			}
		}
	case networkingv1.PathTypeImplementationSpecific:
		if p.Path != "" && !absolute {
			wrong("must be an absolute path")
		}
	default:
		errs = append(errs, field.NotSupported(fldPath.Child("pathType"), *p.PathType, []networkingv1.PathType{
			networkingv1.PathTypeExact, networkingv1.PathTypeImplementationSpecific, networkingv1.PathTypePrefix}))
	}
	return append(errs, validateIngressBackend(&p.Backend, fldPath.Child("backend"))...)
}

func validateIngressBackend(b *networkingv1.IngressBackend, fldPath *field.Path) field.ErrorList {
	switch {
	case b.Resource != nil && b.Service != nil:
		return field.ErrorList{field.Invalid(fldPath, "", "cannot set both resource and service backends")}
	case b.Resource != nil:
		return validateTypedReference(b.Resource.APIGroup, b.Resource.Kind, b.Resource.Name, fldPath.Child("resource"))
	case b.Service == nil:
		return field.ErrorList{field.Invalid(fldPath, "", "resource or service backend is required")}
	}
	var errs field.ErrorList
	service := fldPath.Child("service")
	if b.Service.Name == "" {
		errs = append(errs, field.Required(service.Child("name"), ""))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(service.Child("name"), b.Service.Name,
			validation.IsDNS1123Label(b.Service.Name))...)
	}
	switch p := b.Service.Port; {
	case p.Name != "" && p.Number != 0:
		errs = append(errs, field.Invalid(fldPath, "", "cannot set both port name & port number"))
	case p.Name != "":
		errs = append(errs, fieldrules.InvalidErrors(service.Child("port", "name"), p.Name,
			validation.IsValidPortName(p.Name))...)
	case p.Number != 0:
		errs = append(errs, fieldrules.InvalidErrors(service.Child("port", "number"), p.Number,
			validation.IsValidPortNum(int(p.Number)))...)
	default:
		errs = append(errs, field.Required(fldPath, "port name or number is required"))
	}
	return errs
}

// validateTypedReference validates a reference to an object of any kind in the namespace of the
// object that contains the reference.
func validateTypedReference(group *string, kind, name string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if group != nil {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("apiGroup"), *group,
			validation.IsDNS1123Subdomain(*group))...)
	}
	errs = append(errs, fieldrules.ValidateRequiredSegment(kind, fldPath.Child("kind"))...)
	return append(errs, fieldrules.ValidateRequiredSegment(name, fldPath.Child("name"))...)
}

// validateIngressStatus validates the addresses in the status. Addresses in a legacy format are
// allowed if the stored status already contains them.
func validateIngressStatus(list, stored []networkingv1.IngressLoadBalancerIngress) field.ErrorList {
	var known []string
	for _, in := range stored {
		known = append(known, in.IP)
	}
	var errs field.ErrorList
	for i, in := range list {
		fldPath := field.NewPath("status", "loadBalancer", "ingress").Index(i)
		if in.IP != "" {
			errs = append(errs, validation.IsValidIPForLegacyField(fldPath.Child("ip"), in.IP, true, known)...)
		}
		if h := in.Hostname; h != "" {
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("hostname"), h,
				validation.IsDNS1123Subdomain(h))...)
			if isIP(h) {
				errs = append(errs, field.Invalid(fldPath.Child("hostname"), h,
					"must be a DNS name, not an IP address"))
			}
		}
	}
	return errs
}

// isIP reports whether a text is an IP address. It accepts leading zeros, which some parsers read
// as decimal.
func isIP(text string) bool {
	return len(validation.IsValidIPForLegacyField(nil, text, false, nil)) == 0
}
