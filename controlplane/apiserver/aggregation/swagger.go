package aggregation

import (
	"context"

	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/apiserver/openapi"
)

// Limits of OpenAPI v2 documents in bytes: size of one document as received, and total size of all
// parts that Swagger returns.
const (
	maxSwagger  = 4 << 20
	maxSwaggers = 16 << 20
)

// Swagger returns the OpenAPI v2 documents of the aggregated API servers, as parts to be merged, in
// the order of the APIServices. For a server that does not respond, it returns the last known part.
// Servers without a valid document are omitted.
func (l *Layer) Swagger(ctx context.Context) []*openapi.Part {
	remotes := l.Remotes(ctx)
	heard := make([]*openapi.Part, len(remotes))
	l.visitDocuments(ctx, remotes, func(i int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		if !isAvailable(s) {
			if is := lookUpDocument(l, r, &r.discovery, s, l.readResources(r)); !is.current {
				r.mu.Lock()
				defer r.mu.Unlock()
				heard[i] = r.swagger.value
				return is.pendingFirst
			}
		}
		is := lookUpDocument(l, r, &r.swagger, s, l.readSwagger(r))
		heard[i] = is.value
		return is.pendingFirst
	})
	var out []*openapi.Part
	room := maxSwaggers
	for _, p := range heard {
		if p != nil && p.Size() <= room {
			out, room = append(out, p), room-p.Size()
		}
	}
	return out
}

func (l *Layer) readSwagger(r *remote) func(context.Context) (*openapi.Part, error) {
	return func(ctx context.Context) (*openapi.Part, error) {
		data, err := r.fetchDocument(ctx, "/openapi/v2", "application/json", documentUser, maxSwagger)
		if err != nil {
			return nil, err
		}
		l.parsing.Lock()
		defer l.parsing.Unlock()
		return openapi.NewPart(data, r.groupVersion())
	}
}
