package builtin_test

import (
	"slices"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The API server sets the requester of a CertificateSigningRequest, and no update changes it.
// Approval requires permission to update the approval subresource, and the verb approve on the
// signer.
func TestCertificateRequests(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	all := []rbacv1.PolicyRule{{Verbs: []string{"*"}, APIGroups: []string{"certificates.k8s.io"},
		Resources: []string{"certificatesigningrequests", "certificatesigningrequests/approval",
			"certificatesigningrequests/status"}}}
	role := func(name string, rules ...rbacv1.PolicyRule) {
		r.Must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules})
	}
	bind := func(role, user string) {
		r.Must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: role + "." + user},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects: []rbacv1.Subject{apiservertest.UserSubject(user)}})
	}
	role("asks", all...)
	role("approves", rbacv1.PolicyRule{Verbs: []string{"approve"}, APIGroups: []string{"certificates.k8s.io"},
		Resources: []string{"signers"}, ResourceNames: []string{"x.io/*"}})
	bind("asks", "bob")
	bind("asks", "ann")
	bind("approves", "ann")

	asked := apiservertest.NewCertificateRequest()
	asked.Name, asked.Spec.Username, asked.Spec.Groups = "c", "admin", []string{"system:masters"}
	asked.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
		{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue}}
	bob := r.Client("bob", "team").CertificatesV1().CertificateSigningRequests()
	ann := r.Client("ann").CertificatesV1().CertificateSigningRequests()
	got, err := bob.Create(ctx, asked, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if s := got.Spec; s.Username != "bob" || !slices.Contains(s.Groups, "team") ||
		slices.Contains(s.Groups, "system:masters") || len(got.Status.Conditions) > 0 {
		t.Errorf("asked by %s of %q, conditions %v", s.Username, s.Groups, got.Status.Conditions)
	}
	got.Spec.Username, got.Labels = "admin", map[string]string{"a": "b"}
	if got, err = ann.Update(ctx, got, metav1.UpdateOptions{}); err != nil || got.Spec.Username != "bob" ||
		got.Labels["a"] != "b" {
		t.Errorf("updated: %v, asked by %s", err, got.Spec.Username)
	}
	got.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
		{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "r"}}
	if _, err := bob.UpdateApproval(ctx, "c", got, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("approved by its maker: %v", err)
	}
	if got, err = ann.UpdateApproval(ctx, "c", got, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if c := got.Status.Conditions[0]; c.LastUpdateTime.IsZero() || c.LastTransitionTime.IsZero() || c.Reason != "r" {
		t.Errorf("approved: %+v", c)
	}
	got.Status.Certificate = []byte(apiservertest.ValidCA)
	if _, err := ann.UpdateStatus(ctx, got, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("signed by who may only approve: %v", err)
	}
	signed, err := r.Admin().CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, got,
		metav1.UpdateOptions{})
	if err != nil || string(signed.Status.Certificate) != apiservertest.ValidCA {
		t.Errorf("signed: %v", err)
	}
	list, err := ann.List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=x.io/y"})
	if err != nil || len(list.Items) != 1 {
		t.Errorf("of the signer: %v, %v", list.Items, err)
	}
}
