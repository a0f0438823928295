package why

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/ingressproxy/ingress"
)

// explainIngress returns the Findings about an Ingress that is being deleted, has no valid class,
// has rules that cannot be served, or has no address. It returns nil for any other Ingress, and if
// another controller serves it. It also returns nil if the required lists could not be read.
func (w trafficExplainer) explainIngress(i *networkingv1.Ingress) []Finding {
	if f := explainDeletion(i, "ingress"); f != nil {
		return []Finding{*f}
	}
	if f := w.explainUnclassed(i); f != nil {
		return []Finding{*f}
	}
	if !w.world.hasList(Classes) || !w.world.hasList(Services) || !w.world.hasList(Slices) {
		return nil
	}
	judged := i
	if !w.world.hasList(Secrets) {
		judged = i.DeepCopy()
		judged.Spec.TLS = nil
	}
	var out []Finding
	if class := w.ingressClass(ingress.ClassOf(i)); class == nil || class.Spec.Controller != ingress.Controller {
		return nil // the rules of other controllers are not known
	}
	for _, problem := range ingress.Problems(judged, ingressWorld{w.world}) {
		out = append(out, Finding{Object: objectName("ingress", i), What: "is not served as it says", Because: problem,
			Mend: []string{kctlCommand(i, "get services,endpointslices"), kctlCommand(i, "edit ingress %s", i.Name)}})
	}
	if len(i.Status.LoadBalancer.Ingress) == 0 {
		out = append(out, Finding{Object: objectName("ingress", i), What: "has no address",
			Since:   timeOrNil(i.CreationTimestamp),
			Because: "the Service of its proxies has none; they serve at its node ports all the same",
			Mend: []string{fmt.Sprintf("kctl -n keelson-entry get service,pods   # of class %s", ingress.ClassOf(i)),
				fmt.Sprintf("kctl -n keelson-entry why service/%s", shellWord(ingress.ClassOf(i)))}})
	}
	return out
}

// healthyIngressText returns the state of an Ingress without Findings, such as that another
// controller serves it.
func (w trafficExplainer) healthyIngressText(i *networkingv1.Ingress) string {
	if !w.world.hasList(Classes) || !w.world.hasList(Services) || !w.world.hasList(Slices) {
		return "whether it is served was not judged"
	}
	if class := w.ingressClass(ingress.ClassOf(i)); class != nil && class.Spec.Controller != ingress.Controller {
		return "it is the business of controller " + class.Spec.Controller + ", for which this does not judge"
	}
	return "its class, its Services and its Secrets fit together"
}

func (w trafficExplainer) ingressClass(name string) *networkingv1.IngressClass {
	for i := range w.world.Route.Classes {
		if w.world.Route.Classes[i].Name == name {
			return &w.world.Route.Classes[i]
		}
	}
	return nil
}

// explainUnclassed returns a Finding for an Ingress that names no IngressClass or a missing
// IngressClass. It returns nil otherwise, or if IngressClasses could not be read.
func (w trafficExplainer) explainUnclassed(i *networkingv1.Ingress) *Finding {
	if !w.world.hasList(Classes) {
		return nil
	}
	f := &Finding{Object: objectName("ingress", i), What: "is served by nobody", Since: timeOrNil(i.CreationTimestamp)}
	class := ingress.ClassOf(i)
	switch {
	case class == "":
		f.Because = "it names no class, and there was no default class when it was made"
	case w.ingressClass(class) == nil:
		f.Because = fmt.Sprintf("there is no IngressClass %s", class)
	default:
		return nil
	}
	f.Mend = []string{"kctl get ingressclasses",
		kctlCommand(i, `patch ingress %s -p '{"spec":{"ingressClassName":"CLASS"}}'`, i.Name)}
	return f
}

// ingressWorld gives read access to the objects of a World. Package ingress uses it to evaluate the
// rules of an Ingress.
type ingressWorld struct{ w *World }

// Service returns the Service with the given namespace and name. It returns nil if the World does
// not contain it.
func (v ingressWorld) Service(namespace, name string) *corev1.Service {
	for i := range v.w.Route.Services {
		if s := &v.w.Route.Services[i]; s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}

// Slices returns those EndpointSlices in the World that belong to the given Service.
func (v ingressWorld) Slices(namespace, service string) (out []*discoveryv1.EndpointSlice) {
	for i := range v.w.Route.Slices {
		if s := &v.w.Route.Slices[i]; s.Namespace == namespace && s.Labels[discoveryv1.LabelServiceName] == service {
			out = append(out, s)
		}
	}
	return out
}

// Secret returns the Secret with the given namespace and name. It returns nil if the World does not
// contain it.
func (v ingressWorld) Secret(namespace, name string) *corev1.Secret {
	for i := range v.w.Route.Secrets {
		if s := &v.w.Route.Secrets[i]; s.Namespace == namespace && s.Name == name {
			return s
		}
	}
	return nil
}
