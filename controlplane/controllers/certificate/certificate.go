package certificate

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Options configures the controller of CertificateSigningRequests.
type Options struct {
	// Sign signs request r, which Permitted has accepted, with the cluster's current CA. The
	// certificate is valid for the duration life. Sign returns the certificate chain as PEM.
	Sign func(r *x509.CertificateRequest, usage x509.KeyUsage, extended []x509.ExtKeyUsage, life time.Duration,
		now time.Time) (chain []byte, err error)
	// Reserved are organizations that no certificate may contain.
	Reserved []string
}

type request = certificatesv1.CertificateSigningRequest

// New returns the controller of CertificateSigningRequests.
func New(d engine.Deps, o Options) *engine.Descriptor {
	requests := client.Informer[*request](d.Informers)
	group := []string{certificatesv1.GroupName}
	return &engine.Descriptor{
		Name:    "certificate-controller",
		Workers: 2,
		Watches: []engine.Watch{engine.OnInformer(requests, engine.Self[*request])},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: group, Resources: []string{"certificatesigningrequests"},
				Verbs: []string{"delete", "get", "list", "watch"}},
			{APIGroups: group, Resources: []string{"certificatesigningrequests/approval",
				"certificatesigningrequests/status"}, Verbs: []string{"update"}},
			{APIGroups: group, Resources: []string{"signers"},
				ResourceNames: []string{certificatesv1.KubeAPIServerClientKubeletSignerName},
				Verbs:         []string{"approve"}},
			{APIGroups: group, Resources: []string{"signers"}, Verbs: []string{"sign"}, ResourceNames: []string{
				certificatesv1.KubeAPIServerClientSignerName, certificatesv1.KubeAPIServerClientKubeletSignerName,
				certificatesv1.KubeletServingSignerName}},
			{APIGroups: []string{authorizationv1.GroupName}, Resources: []string{"subjectaccessreviews"},
				Verbs: []string{"create"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, options: o, view: engine.ViewOf[*request](t, requests)}
			return r.reconcileRequest
		},
	}
}

// reconciler reconciles CertificateSigningRequests during one term of leadership. Every term has a
// new reconciler.
type reconciler struct {
	term    *engine.Term
	options Options
	view    *engine.View[*request]
}

func (r *reconciler) reconcileRequest(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, ok := r.view.Get("", key.Name)
	if !ok || c.DeletionTimestamp != nil {
		return 0, nil
	}
	for {
		action, again := PlanRequest(c, r.term.Now())
		if action == Wait {
			return again, nil
		}
		next, err := r.performAction(ctx, action, c)
		switch {
		case apierrors.IsNotFound(err):
			return 0, nil
		case err != nil:
			return 0, fmt.Errorf("to %s CertificateSigningRequest %s: %w", action, c.Name, err)
		case next == nil: // the action wrote nothing
			return again, nil
		}
		r.view.RecordWrite(next)
		c = next
	}
}

// performAction performs the given action for request c. It returns the stored request, or nil if
// nothing was written.
func (r *reconciler) performAction(ctx context.Context, action Action, c *request) (*request, error) {
	if action == Remove {
		o := engine.DeleteOnlyUID(c)
		// the deletion must fail if the request was decided concurrently
		o.Preconditions.ResourceVersion = &c.ResourceVersion
		return nil, client.Delete[*request](ctx, r.term.Client, "", c.Name, o)
	}
	asked, err := parseRequest(c.Spec.Request)
	if err != nil {
		return nil, err
	}
	if action == Review {
		return r.approveNodeRequest(ctx, c, asked)
	}
	next := c.DeepCopy()
	if err := Permitted(c.Spec.SignerName, asked, c.Spec.Usages, r.options.Reserved); err != nil {
		r.setCondition(next, certificatesv1.CertificateFailed, "SignerValidationFailure", err.Error())
	} else {
		usage, extended := x509Usages(c.Spec.Usages)
		next.Status.Certificate, err = r.options.Sign(asked, usage, extended,
			Life(c.Spec.ExpirationSeconds), r.term.Now())
		if err != nil {
			return nil, err
		}
	}
	return client.UpdateStatus(ctx, r.term.Client, next)
}

// approveNodeRequest approves request c if RBAC gives the requester one of the permissions that
// Rights returns. csr is the parsed certificate request of c.
func (r *reconciler) approveNodeRequest(ctx context.Context, c *request, csr *x509.CertificateRequest) (
	*request, error,
) {
	for _, right := range Rights(c, csr) {
		allowed, err := r.isRequesterAllowed(ctx, c, right)
		if err != nil {
			return nil, err
		}
		if !allowed {
			continue
		}
		message := "Auto approving kubelet client certificate after SubjectAccessReview."
		if right == "selfnodeclient" {
			message = "Auto approving self kubelet client certificate after SubjectAccessReview."
		}
		next := c.DeepCopy()
		r.setCondition(next, certificatesv1.CertificateApproved, "AutoApproved", message)
		return client.UpdateSub(ctx, r.term.Client, next, "approval")
	}
	return nil, nil
}

// isRequesterAllowed reports whether RBAC allows the requester of c to create this subresource of
// CertificateSigningRequests.
func (r *reconciler) isRequesterAllowed(ctx context.Context, c *request, subresource string) (bool, error) {
	ask := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: c.Spec.Username, UID: c.Spec.UID, Groups: c.Spec.Groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Group: certificatesv1.GroupName, Resource: "certificatesigningrequests", Verb: "create",
			Subresource: subresource, Version: "*",
		},
	}}
	for k, v := range c.Spec.Extra {
		if ask.Spec.Extra == nil {
			ask.Spec.Extra = map[string]authorizationv1.ExtraValue{}
		}
		ask.Spec.Extra[k] = authorizationv1.ExtraValue(v)
	}
	answer, err := client.Create(ctx, r.term.Client, ask)
	if err != nil {
		return false, fmt.Errorf("reviewing the access of user %s: %w", c.Spec.Username, err)
	}
	return answer.Status.Allowed, nil
}

func (r *reconciler) setCondition(c *request, t certificatesv1.RequestConditionType, reason, message string) {
	now := metav1.NewTime(r.term.Now())
	c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: t, Status: corev1.ConditionTrue, Reason: reason, Message: message, LastUpdateTime: now,
		LastTransitionTime: now,
	})
}
