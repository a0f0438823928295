package server

import (
	"context"
	"errors"
	"net/url"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
)

// autoscalerMetrics returns the client with which HorizontalPodAutoscalers read metrics APIs. Its
// user is the service account kube-system/horizontal-pod-autoscaler, to which the manifests of
// metrics servers grant access.
func (r *Replica) autoscalerMetrics() *horizontalpodautoscaler.APIs {
	u := api.User{Name: api.ServiceAccountPrefix + "kube-system:horizontal-pod-autoscaler",
		Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
	return &horizontalpodautoscaler.APIs{Client: r.api.client.As(u),
		Read: func(ctx context.Context, path string, query url.Values) ([]byte, error) {
			body, err := r.api.server.Aggregated().Get(ctx, u, path, query)
			if errors.Is(err, apiserver.ErrNotAggregated) {
				return nil, horizontalpodautoscaler.ErrNotRegistered
			}
			return body, err
		}}
}
