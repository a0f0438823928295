module keelson.dev/keelson/test/openapi/upstream

go 1.26.0

// The module is required for its files in api/openapi-spec. No package imports it, so go mod tidy would drop it.
require k8s.io/kubernetes v1.37.2
