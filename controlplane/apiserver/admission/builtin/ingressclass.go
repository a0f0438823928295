package builtin

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// ingressClassAnnotation is the deprecated annotation for the class of an Ingress, which the field
// ingressClassName replaced.
const ingressClassAnnotation = "kubernetes.io/ingress.class"

// defaultIngressClass returns a plugin that sets the default class of an Ingress without a class.
// If several classes are the default, it uses the newest, and among equally old ones the first by
// name.
func defaultIngressClass(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		in, ok := a.Whole.(*networkingv1.Ingress)
		if !ok || !a.CreatesObject() || in.Spec.IngressClassName != nil ||
			in.Annotations[ingressClassAnnotation] != "" {
			return nil
		}
		classes, err := c.List(ctx, "ingressclasses", "", true)
		if err != nil {
			return admission.AsStatus(err)
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
