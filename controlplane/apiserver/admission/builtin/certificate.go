package builtin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// certificateRequester returns a plugin that sets the requester (spec.username, groups, uid, extra)
// of new CertificateSigningRequests, on which signers rely. In updates of the approval or status,
// it sets missing timestamps of conditions.
func certificateRequester(clock func() time.Time) func(context.Context, *admission.Attempt) error {
	return func(_ context.Context, a *admission.Attempt) error {
		if _, ok := a.Whole.(*certificatesv1.CertificateSigningRequest); !ok {
			return nil
		}
		switch {
		case a.CreatesObject():
			a.DeriveFields(func(whole api.Object) {
				requestedBy(&whole.(*certificatesv1.CertificateSigningRequest).Spec, a.User)
			})
		case a.Facet == "approval" || a.Facet == "status":
			old, _ := a.Stored.(*certificatesv1.CertificateSigningRequest)
			now := metav1.NewTime(clock().UTC().Truncate(time.Second))
			a.DeriveFields(func(whole api.Object) {
				setConditionTimes(whole.(*certificatesv1.CertificateSigningRequest), old, now)
			})
		}
		return nil
	}
}

func requestedBy(s *certificatesv1.CertificateSigningRequestSpec, u api.User) {
	s.Username, s.UID, s.Groups, s.Extra = u.Name, u.UID, slices.Clone(u.Groups), nil
	for k, v := range u.Extra {
		if s.Extra == nil {
			s.Extra = map[string]certificatesv1.ExtraValue{}
		}
		s.Extra[k] = slices.Clone(v)
	}
}

// setConditionTimes sets missing timestamps of the conditions of c. A condition with the same
// status as in old keeps its transition time.
func setConditionTimes(c, old *certificatesv1.CertificateSigningRequest, timestamp metav1.Time) {
	for i := range c.Status.Conditions {
		n := &c.Status.Conditions[i]
		if n.LastUpdateTime.IsZero() {
			n.LastUpdateTime = timestamp
		}
		if !n.LastTransitionTime.IsZero() {
			continue
		}
		n.LastTransitionTime = timestamp
		if old == nil {
			continue
		}
		for _, was := range old.Status.Conditions {
			if was.Type == n.Type && was.Status == n.Status && !was.LastTransitionTime.IsZero() {
				n.LastTransitionTime = was.LastTransitionTime
				break
			}
		}
	}
}

// signerRights returns a plugin that requires a permission on the signer of a certificate request
// or ClusterTrustBundle, in addition to the permission on the object. The verb is approve, sign or
// attest (for ClusterTrustBundles).
func signerRights(c Config) func(context.Context, *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		verb, signer, words := signerRight(a)
		if verb == "" {
			return nil
		}
		domain, _, _ := strings.Cut(signer, "/")
		if c.Access.Signer(ctx, a.User, verb, signer) || c.Access.Signer(ctx, a.User, verb, domain+"/*") {
			return nil
		}
		return admission.NewForbidden(a, a.Whole, fmt.Errorf("user not permitted to %s signerName %q", words, signer))
	}
}

// signerRight returns the verb and the signer for which an attempt requires a permission, and the
// words for the verb in an error message. All are "" if no permission is required.
func signerRight(a *admission.Attempt) (verb, signer, words string) {
	switch o := a.Whole.(type) {
	case *certificatesv1.CertificateSigningRequest:
		old, ok := a.Stored.(*certificatesv1.CertificateSigningRequest)
		switch {
		case !ok:
		case a.Facet == "approval":
			return "approve", old.Spec.SignerName, "approve requests with"
		case a.Facet == "status" && !equalObjects(o.Status, old.Status):
			return "sign", old.Spec.SignerName, "sign requests with"
		}
	case *certificatesv1.ClusterTrustBundle:
		old, _ := a.Stored.(*certificatesv1.ClusterTrustBundle)
		if o.Spec.SignerName == "" || old != nil && equalObjects(o.Spec, old.Spec) {
			return "", "", ""
		}
		return "attest", o.Spec.SignerName, "attest for"
	}
	return "", "", ""
}

// certificateSubject rejects client certificate requests for the group system:masters.
func certificateSubject(_ context.Context, a *admission.Attempt) error {
	c, ok := a.Whole.(*certificatesv1.CertificateSigningRequest)
	if !ok || !a.CreatesObject() || c.Spec.SignerName != certificatesv1.KubeAPIServerClientSignerName {
		return nil
	}
	groups, err := requestedGroups(c.Spec.Request)
	if err != nil {
		return admission.NewForbidden(a, c, fmt.Errorf("failed to parse CSR: %w", err))
	}
	if slices.Contains(groups, api.GroupMasters) {
		return admission.NewForbidden(a, c, fmt.Errorf("use of %s signer with %s group is not allowed",
			c.Spec.SignerName, api.GroupMasters))
	}
	return nil
}
