package apps_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestWorkloadValidation(t *testing.T) {
	deploy := func(spec, labels string) string {
		return "{metadata: {name: a}, spec: {" + spec + " template: {metadata: {labels: {" + labels +
			"}}, spec: {containers: [{name: c, image: i}]}}}}"
	}
	kindstest.CheckErrors(t, "good", kindstest.ValidationErrors[*appsv1.Deployment](t,
		deploy("selector: {matchLabels: {a: b}},", "a: b")))
	kindstest.CheckErrors(t, "labels", kindstest.ValidationErrors[*appsv1.Deployment](t,
		deploy("selector: {matchLabels: {a: b}},", "a: c")),
		"spec.template.metadata.labels: Invalid value: {\"a\":\"c\"}: `selector` does not match template `labels`")
	kindstest.CheckErrors(t, "no selector", kindstest.ValidationErrors[*appsv1.Deployment](t, deploy("", "a: b")),
		"spec.selector: Required value",
		"spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match template `labels`")
	kindstest.CheckErrors(t, "empty selector",
		kindstest.ValidationErrors[*appsv1.Deployment](t, deploy("selector: {},", "a: b")),
		"spec.selector: Invalid value: {}: empty selector is invalid")
	kindstest.CheckErrors(t, "no progress", kindstest.ValidationErrors[*appsv1.Deployment](t,
		deploy("selector: {matchLabels: {a: b}}, strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0%}},",
			"a: b")),
		`spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "0%": may not be 0 when `+"`maxSurge` is 0")
	kindstest.CheckErrors(t, "replicas", kindstest.ValidationErrors[*appsv1.ReplicaSet](t,
		deploy("replicas: -1, selector: {matchLabels: {a: b}},", "a: b")), "spec.replicas: Invalid value: -1")
	kindstest.CheckErrors(t, "template", kindstest.ValidationErrors[*appsv1.Deployment](t,
		strings.Replace(deploy("selector: {matchLabels: {a: b}},", "a: b"), "image: i", "imagePullPolicy: Always", 1)),
		"spec.template.spec.containers[0].image: Required value")
}

func TestScale(t *testing.T) {
	d := kindstest.Load[*appsv1.Deployment](t,
		"{metadata: {name: a, generation: 4, resourceVersion: '7'}, spec: {selector: {matchLabels: {a: "+
			"b}}, replicas: 2}}")
	sub := kinds.All().ByType(d).Subresources["scale"]
	view := sub.View(d).(*autoscalingv1.Scale)
	if view.Spec.Replicas != 2 || view.Status.Selector != "a=b" || view.Kind != "Scale" || view.ResourceVersion != "7" {
		t.Errorf("view %+v", view)
	}
	view.Spec.Replicas = 5
	if err := sub.Merge(d, view); err != nil || *d.Spec.Replicas != 5 || d.Generation != 5 {
		t.Errorf("%v, replicas %d, generation %d", err, *d.Spec.Replicas, d.Generation)
	}
	view.Spec.Replicas = -1
	if err := sub.Merge(d, view); !apierrors.IsInvalid(err) {
		t.Errorf("negative: %v", err)
	}
	view.Spec.Replicas, view.ResourceVersion = 3, "6"
	if err := sub.Merge(d, view); !apierrors.IsConflict(err) {
		t.Errorf("stale: %v", err)
	}
	if err := sub.Merge(d, d); !apierrors.IsBadRequest(err) {
		t.Errorf("not a Scale: %v", err)
	}
}
