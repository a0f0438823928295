package subresource

import (
	"context"
	"errors"
	"fmt"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
)

const (
	defaultTokenSeconds = 3600
	minTokenSeconds     = 600
	maxTokenSeconds     = 1 << 32
)

var tokenRequestKind = authenticationv1.SchemeGroupVersion.WithKind("TokenRequest")

// Token performs a create of serviceaccounts/token: it signs a token for the service account. The
// token is bound to an object if the request references one.
func (v *Verbs) Token(ctx context.Context, r *api.Request, a registry.Admission) (runtime.Object, error) {
	tr, ok := r.Object.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a TokenRequest object: %T", r.Object))
	}
	if v.Tokens == nil {
		return nil, apierrors.NewServiceUnavailable("this cluster has no key to sign service account tokens")
	}
	o, err := v.getStored(ctx, corev1.SchemeGroupVersion.WithResource("serviceaccounts"), r.Namespace, r.Name)
	if err != nil {
		return nil, err
	}
	sa := o.(*corev1.ServiceAccount)
	body, err := Admit(ctx, r, a, tr, sa)
	if err != nil {
		return nil, err
	}
	tr = body.(*authenticationv1.TokenRequest)
	if tr.Name != "" && tr.Name != sa.Name || tr.Namespace != "" && tr.Namespace != sa.Namespace {
		return nil,
			apierrors.NewBadRequest("name or namespace in the TokenRequest does not match the service " +
				"account in the URL")
	}
	seconds := ptr.Deref(tr.Spec.ExpirationSeconds, int64(defaultTokenSeconds))
	if errs := validTokenRequest(seconds, tr.Spec.Audiences); len(errs) > 0 {
		return nil, apierrors.NewInvalid(tokenRequestKind.GroupKind(), "", errs)
	}
	if v.TokenCeiling != nil {
		if most := int64(v.TokenCeiling(r.User) / time.Second); most > 0 && seconds > most {
			api.Warn(ctx, fmt.Sprintf("requested expiration of %d seconds shortened to %d seconds", seconds, most))
			seconds = most
		}
	}
	claims := pki.Claims{
		Audiences: tr.Spec.Audiences, Namespace: sa.Namespace,
		ServiceAccount: pki.Ref{Name: sa.Name, UID: string(sa.UID)},
	}
	if err := v.bindToken(ctx, sa, tr.Spec.BoundObjectRef, &claims); err != nil {
		return nil, err
	}
	now := v.Clock()
	text, signed, err := v.Tokens.Sign(claims, time.Duration(seconds)*time.Second, now)
	if err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("issuing a token of service account %s/%s: %w",
			sa.Namespace, sa.Name, err))
	}
	out := tr.DeepCopy()
	out.SetGroupVersionKind(tokenRequestKind)
	out.Name, out.Namespace, out.UID = sa.Name, sa.Namespace, ""
	out.CreationTimestamp = metav1.NewTime(signed.IssuedAt)
	out.Spec.Audiences, out.Spec.ExpirationSeconds = signed.Audiences, &seconds
	out.Status = authenticationv1.TokenRequestStatus{Token: text, ExpirationTimestamp: metav1.NewTime(signed.Expiry)}
	return out, nil
}

func validTokenRequest(seconds int64, audiences []string) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	if seconds < minTokenSeconds {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), seconds,
			"may not specify a duration less than 10 minutes"))
	}
	if seconds > maxTokenSeconds {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), seconds,
			"may not specify a duration larger than 2^32 seconds"))
	}
	for i, a := range audiences {
		if a == "" {
			errs = append(errs, field.Invalid(spec.Child("audiences").Index(i), a, "must not be empty"))
		}
	}
	return errs
}

// bindToken adds the object that the request references to the claims: the token is valid only
// while this object exists. It returns an error if the object does not exist or does not match.
func (v *Verbs) bindToken(
	ctx context.Context, sa *corev1.ServiceAccount, ref *authenticationv1.BoundObjectReference, c *pki.Claims,
) error {
	if ref == nil {
		return nil
	}
	resource := map[string]string{"Pod": "pods", "Secret": "secrets", "Node": "nodes"}[ref.Kind]
	if resource == "" || ref.APIVersion != "v1" {
		return apierrors.NewBadRequest(fmt.Sprintf("cannot bind token to object of type %s/%s",
			ref.APIVersion, ref.Kind))
	}
	namespace := sa.Namespace
	if resource == "nodes" {
		namespace = ""
	}
	o, err := v.getStored(ctx, corev1.SchemeGroupVersion.WithResource(resource), namespace, ref.Name)
	if err != nil {
		return err
	}
	if ref.UID != "" && ref.UID != o.GetUID() {
		return apierrors.NewConflict(corev1.Resource(resource), ref.Name, fmt.Errorf(
			"the UID in the bound object reference (%s) does not match the UID in record. The object might have been "+
				"deleted and then recreated", ref.UID))
	}
	bound := &pki.Ref{Name: o.GetName(), UID: string(o.GetUID())}
	switch t := o.(type) {
	case *corev1.Pod:
		if t.Spec.ServiceAccountName != sa.Name {
			return apierrors.NewBadRequest(fmt.Sprintf(
				"cannot bind token for serviceaccount %q to pod running with different serviceaccount name.", sa.Name))
		}
		c.Pod = bound
		if t.Spec.NodeName != "" {
			uid := types.UID("")
			if n, err := v.getStored(ctx, corev1.SchemeGroupVersion.WithResource("nodes"), "", t.Spec.NodeName); err ==
				nil {
				uid = n.GetUID()
			}
			c.Node = &pki.Ref{Name: t.Spec.NodeName, UID: string(uid)}
		}
	case *corev1.Secret:
		c.Secret = bound
	case *corev1.Node:
		c.Node = bound
	default:
		return apierrors.NewInternalError(errors.New("the bound object has another type than requested"))
	}
	return nil
}
