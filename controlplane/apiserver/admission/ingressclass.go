package admission

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"
)

// ingressClassAnnotation is the annotation for an Ingress's class from before the field
// ingressClassName existed.
const ingressClassAnnotation = "kubernetes.io/ingress.class"

// defaultIngressClass returns a plugin that sets the default class of an Ingress without a class.
// Of several default classes it takes the newest, and of equally old ones the first by name.
func defaultIngressClass(c Cluster) func(ctx context.Context, a *Attempt) error {
	return func(ctx context.Context, a *Attempt) error {
		in, ok := a.Whole.(*networkingv1.Ingress)
		if !ok || !a.Creates() || in.Spec.IngressClassName != nil || in.Annotations[ingressClassAnnotation] != "" {
			return nil
		}
		classes, err := c.List(ctx, "ingressclasses", "", true)
		if err != nil {
			return asStatus(err)
		}
		var best *networkingv1.IngressClass
		for _, o := range classes {
			one := o.(*networkingv1.IngressClass)
			if one.Annotations[networkingv1.AnnotationIsDefaultIngressClass] != "true" {
				continue
			}
			if best == nil || best.CreationTimestamp.Before(&one.CreationTimestamp) ||
				best.CreationTimestamp.Equal(&one.CreationTimestamp) && one.Name < best.Name {
				best = one
			}
		}
		if best != nil {
			name := best.Name
			in.Spec.IngressClassName = &name
		}
		return nil
	}
}
