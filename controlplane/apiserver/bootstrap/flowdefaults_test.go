package bootstrap_test

import (
	"strings"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A cluster has the flow schemas and priority levels that Kubernetes begins with. They come back
// when they are deleted, and so do their specs, but where somebody has taken a suggested one over;
// those of an earlier release go.
func TestFlowSchemasAreKept(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	schemas, levels := r.Admin().FlowcontrolV1().FlowSchemas(), r.Admin().FlowcontrolV1().PriorityLevelConfigurations()
	keep := func() {
		t.Helper()
		if err := r.Setup.EnsureFlowControl(ctx, 0); err != nil {
			t.Fatal(err)
		}
	}
	listed, err := schemas.List(ctx, metav1.ListOptions{})
	if err != nil || len(listed.Items) != 11 {
		t.Fatalf("%d flow schemas, %v", len(listed.Items), err)
	}
	for _, f := range listed.Items {
		if c := f.Status.Conditions; len(c) != 1 || c[0].Type != flowcontrolv1.FlowSchemaConditionDangling ||
			c[0].Status != flowcontrolv1.ConditionFalse || c[0].Reason != "Found" ||
			f.Annotations[flowcontrolv1.AutoUpdateAnnotationKey] != "true" {
			t.Errorf("%s: %v %v", f.Name, c, f.Annotations)
		}
	}
	if l, err := levels.List(ctx, metav1.ListOptions{}); err != nil || len(l.Items) != 8 {
		t.Errorf("%d priority levels, %v", len(l.Items), err)
	}
	before := r.Store.Applied()
	if keep(); r.Store.Applied() != before {
		t.Error("what is as it should be was written")
	}
	patch := func(name, body string) {
		t.Helper()
		if _, err := schemas.Patch(ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"exempt", "catch-all", "service-accounts"} {
		if err := schemas.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	patch("probes", `{"spec":{"matchingPrecedence":3}}`)
	patch("global-default",
		`{"metadata":{"annotations":{"apf.kubernetes.io/autoupdate-spec":"false"}},"spec":{"matchingPrecedence":9000}}`)
	patch("kube-scheduler",
		`{"metadata":{"annotations":{"apf.kubernetes.io/autoupdate-spec":null}},"spec":{"matchingPrecedence":801}}`)
	if _, err := levels.Patch(ctx, "exempt", types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"apf.kubernetes.io/autoupdate-spec":"false"}},`+
			`"spec":{"exempt":{"lendablePercent":7}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	made := func(name, annotation, level string) {
		t.Helper()
		f := &flowcontrolv1.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if annotation != "" {
			f.Annotations = map[string]string{flowcontrolv1.AutoUpdateAnnotationKey: annotation}
		}
		f.Spec.PriorityLevelConfiguration.Name = level
		if _, err := schemas.Create(ctx, f, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	made("of-an-earlier-release", "true", "exempt")
	made("taken-over", "false", "exempt")
	made("mine", "", "no-such")
	keep()
	for name, precedence := range map[string]int32{"exempt": 1, "catch-all": 10000, "service-accounts": 9000,
		"probes": 2, "global-default": 9000, "kube-scheduler": 801, "taken-over": 1000, "mine": 1000} {
		if f, err := schemas.Get(ctx, name, metav1.GetOptions{}); err != nil ||
			f.Spec.MatchingPrecedence != precedence {
			t.Errorf("%s: %v %+v", name, err, f)
		}
	}
	if f, err := schemas.Get(ctx, "kube-scheduler", metav1.GetOptions{}); err != nil ||
		f.Annotations[flowcontrolv1.AutoUpdateAnnotationKey] != "false" {
		t.Errorf("who changed it has it: %v %v", err, f.Annotations)
	}
	if _, err := schemas.Get(ctx, "of-an-earlier-release", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("what an earlier release made: %v", err)
	}
	if l, err := levels.Get(ctx, "exempt", metav1.GetOptions{}); err != nil || *l.Spec.Exempt.LendablePercent != 7 {
		t.Errorf("%v %+v", err, l)
	}
	mine, err := schemas.Get(ctx, "mine", metav1.GetOptions{})
	if err != nil || len(mine.Status.Conditions) != 1 ||
		mine.Status.Conditions[0].Status != flowcontrolv1.ConditionTrue ||
		!strings.Contains(mine.Status.Conditions[0].Message, `"no-such" but there is no such object`) {
		t.Errorf("%v %+v", err, mine.Status)
	}
	if _, err := levels.Create(ctx,
		&flowcontrolv1.PriorityLevelConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "no-such"},
			Spec: flowcontrolv1.PriorityLevelConfigurationSpec{Type: flowcontrolv1.PriorityLevelEnablementLimited,
				Limited: &flowcontrolv1.LimitedPriorityLevelConfiguration{LimitResponse: flowcontrolv1.LimitResponse{
					Type: flowcontrolv1.LimitResponseTypeReject}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	keep()
	if mine, err = schemas.Get(ctx, "mine", metav1.GetOptions{}); err != nil ||
		mine.Status.Conditions[0].Reason != "Found" {
		t.Errorf("%v %+v", err, mine.Status)
	}
}
