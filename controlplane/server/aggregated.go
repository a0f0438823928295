package server

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/controllers"
)

// aggregatedAPIs reaches aggregated APIs for controllers that follow every kind.
type aggregatedAPIs struct{ r *Replica }

// aggregatedUser is the identity by which servers in the cluster see these controllers.
var aggregatedUser = api.User{Name: api.UserController, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}

// Discover implements controllers.AggregatedAPIs.
func (a aggregatedAPIs) Discover(ctx context.Context) ([]controllers.AggregatedResource, map[schema.GroupVersion]error) {
	var all []controllers.AggregatedResource
	unknown := map[schema.GroupVersion]error{}
	for _, remote := range a.r.api.DiscoverAggregated(ctx) {
		if remote.Stale {
			unknown[remote.GV] = fmt.Errorf("stale GroupVersion discovery: %v", remote.GV)
			continue
		}
		for _, res := range remote.Resources {
			if !strings.Contains(res.Name, "/") {
				all = append(all, controllers.AggregatedResource{
					GroupVersionResource: remote.GV.WithResource(res.Name), APIResource: res})
			}
		}
	}
	return all, unknown
}

// Call implements controllers.AggregatedAPIs.
func (a aggregatedAPIs) Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	got, code, err := a.r.api.CallAggregated(ctx, aggregatedUser, method, path, query, body)
	switch {
	case errors.Is(err, apiserver.ErrNotAggregated):
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("%s of %s: %s", method, path, err))
	case err != nil:
		return nil, fmt.Errorf("%s of %s: %w", method, path, err)
	case code/100 != 2:
		return nil, apierrors.NewGenericServerResponse(code, method, schema.GroupResource{}, "",
			apiserver.Refusal(got), 0, true)
	}
	return got, nil
}
