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
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// aggregatedAPIs implements controllers.AggregatedAPIs: it gives controllers that work on objects
// of every kind access to aggregated API servers.
type aggregatedAPIs struct{ r *Replica }

// aggregatedUser is the user as which controllers call aggregated API servers.
var aggregatedUser = api.User{Name: api.UserController, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}

// Discover returns the resources of all aggregated API servers, without subresources. The map
// contains an error for each API group version with unknown resources, because its API server did
// not respond. Discover implements controllers.AggregatedAPIs.
func (a aggregatedAPIs) Discover(ctx context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	var all []engine.AggregatedResource
	unknown := map[schema.GroupVersion]error{}
	for _, remote := range a.r.api.server.Aggregated().Discover(ctx) {
		if remote.Stale {
			unknown[remote.GV] = fmt.Errorf("stale GroupVersion discovery: %v", remote.GV)
			continue
		}
		for _, res := range remote.Resources {
			if !strings.Contains(res.Name, "/") {
				all = append(all, engine.AggregatedResource{
					GroupVersionResource: remote.GV.WithResource(res.Name), APIResource: res})
			}
		}
	}
	return all, unknown
}

// Call sends a request to the aggregated API server that serves path, as the user aggregatedUser.
// It returns the body of a successful response. It implements controllers.AggregatedAPIs.
func (a aggregatedAPIs) Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	got, code, err := a.r.api.server.Aggregated().Call(ctx, aggregatedUser, method, path, query, body)
	switch {
	case errors.Is(err, apiserver.ErrNotAggregated):
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("%s of %s: %s", method, path, err))
	case err != nil:
		return nil, fmt.Errorf("%s of %s: %w", method, path, err)
	case code/100 != 2:
		return nil, apierrors.NewGenericServerResponse(code, method, schema.GroupResource{}, "",
			apiserver.ErrorText(got), 0, true)
	}
	return got, nil
}
