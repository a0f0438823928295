package namespace

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// discoveryFailure is the error that discovery of some group versions failed.
type discoveryFailure map[schema.GroupVersion]error

// Error returns the text that upstream Kubernetes writes to condition
// NamespaceDeletionDiscoveryFailure.
func (f discoveryFailure) Error() string {
	var groups []string
	for gv, err := range f {
		groups = append(groups, fmt.Sprintf("%s: %v", gv, err))
	}
	slices.Sort(groups)
	return fmt.Sprintf("Discovery failed for some groups, %d failing: "+
		"unable to retrieve the complete list of server APIs: %s", len(f), strings.Join(groups, ", "))
}

func isDiscoveryFailure(err error) bool {
	_, ok := err.(discoveryFailure)
	return ok
}

// emptyAggregated deletes the objects of aggregated APIs in namespace ns. It returns the objects
// that still exist, and the failures.
func (r *reconciler) emptyAggregated(ctx context.Context, ns string) (left []Content, failures []error) {
	if r.aggregated == nil {
		return nil, nil
	}
	resources, unknown := r.aggregated.Discover(ctx)
	if len(unknown) > 0 {
		failures = append(failures, discoveryFailure(unknown))
	}
	done := map[schema.GroupResource]bool{} // one version of each resource is sufficient
	for _, res := range resources {
		gr := res.GroupVersionResource.GroupResource()
		if !res.Namespaced || !slices.Contains(res.Verbs, "delete") || done[gr] {
			continue
		}
		done[gr] = true
		objs, err := r.emptyResource(ctx, res, ns)
		if err != nil {
			failures = append(failures, fmt.Errorf("deleting %s of namespace %s: %w", gr, ns, err))
		}
		if len(objs) > 0 {
			left = append(left, Content{Resource: gr.String(), Objects: objs})
		}
	}
	return left, failures
}

// emptyResource deletes the objects of one resource of an aggregated API in namespace ns. It uses
// deletecollection if the API server supports it. It returns the objects that still exist.
func (r *reconciler) emptyResource(
	ctx context.Context, res engine.AggregatedResource, ns string,
) ([]api.Object, error) {
	path := res.Path(ns, "")
	background := metav1.DeletePropagationBackground
	options, err := json.Marshal(metav1.DeleteOptions{TypeMeta: metav1.TypeMeta{APIVersion: "v1",
		Kind: "DeleteOptions"},
		PropagationPolicy: &background})
	if err != nil {
		return nil, err
	}
	listable, collection := slices.Contains(res.Verbs, "list"), slices.Contains(res.Verbs, "deletecollection")
	var objs []api.Object
	if listable {
		if objs, err = r.listAggregated(ctx, path); err != nil || len(objs) == 0 {
			return nil, err
		}
	}
	if !slices.ContainsFunc(objs, func(o api.Object) bool { return o.GetDeletionTimestamp() == nil }) && listable {
		return objs, nil // all objects are already being deleted
	}
	if err := r.term.ConfirmLeadership(ctx); err != nil {
		return objs, err
	}
	switch {
	case collection:
		_, err = r.aggregated.Call(ctx, http.MethodDelete, path, nil, options)
	default:
		for _, o := range objs {
			if err = r.term.ConfirmLeadership(ctx); err != nil {
				break
			}
			_, err = r.aggregated.Call(ctx, http.MethodDelete, path+"/"+url.PathEscape(o.GetName()), nil, options)
			if err != nil && !apierrors.IsNotFound(err) {
				break
			}
		}
	}
	if err != nil && !apierrors.IsMethodNotSupported(err) && !apierrors.IsNotFound(err) {
		return objs, err
	}
	if !listable {
		return nil, nil
	}
	return r.listAggregated(ctx, path)
}

// listAggregated returns the metadata of the first objects in the list at path.
func (r *reconciler) listAggregated(ctx context.Context, path string) ([]api.Object, error) {
	objs, err := engine.ListAggregatedPage(ctx, r.aggregated, path)
	if apierrors.IsMethodNotSupported(err) {
		return nil, nil
	}
	return objs, err
}
