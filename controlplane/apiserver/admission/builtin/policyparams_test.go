package builtin

import (
	"context"
	"testing"

	arv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Administrators need no permission, even with an authorizer that does not grant it. All other
// users need it for writes of the object, but not of its status.
func TestPolicyParamsAndAdministrators(t *testing.T) {
	all := kinds.All()
	admit := policyParams(Config{Kinds: all,
		Access: Access{Allowed: func(context.Context, api.User, string, schema.GroupVersionResource, string, string,
			string) (bool, string) {
			return false, ""
		}}})
	policy := &arv1.ValidatingAdmissionPolicy{}
	policy.Spec.ParamKind = &arv1.ParamKind{APIVersion: "v1", Kind: "Secret"}
	for _, c := range []struct {
		group, facet string
		operation    api.Operation
		refused      bool
	}{
		{api.GroupMasters, "", api.Create, false},
		{api.GroupMasters, "", api.Update, false},
		{"authors", "", api.Create, true},
		{"authors", "", api.Update, true},
		{"authors", "status", api.Update, false},
	} {
		err := admit(t.Context(), &admission.Attempt{Kind: all.ByType(policy), Whole: policy, Operation: c.operation,
			Facet: c.facet,
			User:  api.User{Name: "a", Groups: []string{c.group}}})
		if c.refused != apierrors.IsInvalid(err) || !c.refused && err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
