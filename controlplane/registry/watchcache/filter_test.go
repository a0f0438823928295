package watchcache

import (
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// Any selector is either parsed, with a bounded number of terms, or rejected with 400.
func FuzzSelector(f *testing.F) {
	f.Add("a=b,c!=d,e in (f, g),!h", "metadata.name=x,spec.nodeName!=y")
	f.Add("a in (", "spec.nodeName==")
	f.Add("===", `metadata.name=a\,b`)
	f.Add("!,", "=,,")
	pods := kinds.All().ByResource(schema.GroupVersionResource{Version: "v1", Resource: "pods"})
	pod := pods.Type.New()
	pod.SetName("x")
	f.Fuzz(func(t *testing.T, labels, fields string) {
		req := &api.Request{Kind: pods, Namespace: "default", Verb: api.VerbList}
		got, err := newFilter(req, &metav1.ListOptions{LabelSelector: labels, FieldSelector: fields})
		if err != nil {
			if !apierrors.IsBadRequest(err) {
				t.Errorf("%q %q: %v", labels, fields, err)
			}
			return
		}
		if got.labels != nil {
			if terms, _ := got.labels.Requirements(); len(terms) > maxTerms {
				t.Errorf("%q has %d terms", labels, len(terms))
			}
		}
		if got.fields != nil && len(got.fields.Requirements()) > maxTerms {
			t.Errorf("%q has %d terms", fields, len(got.fields.Requirements()))
		}
		got.matchesSelectors(pod)
	})
}
