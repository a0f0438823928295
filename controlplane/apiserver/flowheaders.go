package apiserver

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
)

// flowSchemasAge is how long an index of the FlowSchemas is used before it is built again.
const flowSchemasAge = time.Second

// flowSchemaIndex caches the index of the FlowSchemas. It is safe for concurrent use.
type flowSchemaIndex struct {
	current atomic.Pointer[datedSchemas]
}

type datedSchemas struct {
	schemas   *flowcontrol.Schemas
	createdAt time.Time
}

// currentSchemas returns the index of the FlowSchemas, at most flowSchemasAge old; nil if the
// FlowSchemas cannot be read.
func (i *flowSchemaIndex) currentSchemas(
	ctx context.Context, k *clusterReader, currentTime time.Time,
) *flowcontrol.Schemas {
	c := i.current.Load()
	if c != nil && currentTime.Sub(c.createdAt) < flowSchemasAge {
		return c.schemas
	}
	listed, err := k.List(ctx, "flowschemas", "", false)
	if err != nil {
		return nil
	}
	configurations, err := k.List(ctx, "prioritylevelconfigurations", "", false)
	if err != nil {
		return nil
	}
	levels := make(map[string]types.UID, len(configurations))
	for _, l := range configurations {
		levels[l.GetName()] = l.GetUID()
	}
	schemas := make([]*flowcontrolv1.FlowSchema, 0, len(listed))
	for _, o := range listed {
		if s, ok := o.(*flowcontrolv1.FlowSchema); ok {
			schemas = append(schemas, s)
		}
	}
	c = &datedSchemas{flowcontrol.NewSchemas(schemas, levels), currentTime}
	i.current.Store(c)
	return c.schemas
}

// setFlowHeaders sets the response headers with the UIDs of the FlowSchema and
// PriorityLevelConfiguration that match a request. As in Kubernetes, responses to proxied requests,
// logs and streams have no such headers. FlowSchemas do not limit requests here; flowcontrol.Gate
// does.
func (s *Server) setFlowHeaders(w http.ResponseWriter, r *http.Request, u api.User) {
	f := &flowcontrol.Request{User: u.Name, Groups: u.Groups, Verb: strings.ToLower(r.Method), Path: r.URL.Path}
	if t, ok := endpoints.ParsePath(r.URL.Path); ok {
		verb := endpoints.VerbOf(r.Method, t, strings.Contains(r.URL.RawQuery, "watch") &&
			endpoints.IsWatch(r.URL.Query()))
		if verb != api.VerbWatch && endpoints.IsLongRunning(r.Method, t, nil) {
			return
		}
		f.Path, f.Verb = "", string(verb)
		f.APIGroup, f.Resource, f.Subresource, f.Namespace = t.GVR.Group, t.GVR.Resource, t.Subresource, t.Namespace
	}
	index := s.cluster.flowSchemas.currentSchemas(r.Context(), s.cluster, s.cfg.Clock())
	if index == nil {
		return
	}
	if match, found := index.Match(f); found {
		w.Header().Set(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID, string(match.Schema))
		w.Header().Set(flowcontrolv1.ResponseHeaderMatchedPriorityLevelConfigurationUID, string(match.Level))
	}
}
