package framework

import "slices"

// Point is the name of an extension point, as in a KubeSchedulerConfiguration.
type Point string

const (
	AtPreEnqueue Point = "preEnqueue"
	AtQueueSort  Point = "queueSort"
	AtPreFilter  Point = "preFilter"
	AtFilter     Point = "filter"
	AtPostFilter Point = "postFilter"
	AtPreScore   Point = "preScore"
	AtScore      Point = "score"
	AtReserve    Point = "reserve"
	AtPermit     Point = "permit"
	AtPreBind    Point = "preBind"
	AtBind       Point = "bind"
	AtPostBind   Point = "postBind"
)

// Points returns all extension points in the order in which a pod passes them.
func Points() []Point {
	return []Point{AtPreEnqueue, AtQueueSort, AtPreFilter, AtFilter, AtPostFilter, AtPreScore, AtScore, AtReserve, AtPermit,
		AtPreBind, AtBind, AtPostBind}
}

// Has reports whether the plugin implements this extension point.
func (at Point) Has(p Plugin) bool {
	ok := false
	switch at {
	case AtPreEnqueue:
		_, ok = p.(PreEnqueue)
	case AtQueueSort:
		_, ok = p.(QueueSort)
	case AtPreFilter:
		_, ok = p.(PreFilter)
	case AtFilter:
		_, ok = p.(Filter)
	case AtPostFilter:
		_, ok = p.(PostFilter)
	case AtPreScore:
		_, ok = p.(PreScore)
	case AtScore:
		_, ok = p.(Score)
	case AtReserve:
		_, ok = p.(Reserve)
	case AtPermit:
		_, ok = p.(Permit)
	case AtPreBind:
		_, ok = p.(PreBind)
	case AtBind:
		_, ok = p.(Bind)
	case AtPostBind:
		_, ok = p.(PostBind)
	}
	return ok
}

// Layout lists the plugins of each extension point, in the order in which they run. Weights apply
// to AtScore only.
type Layout map[Point][]Weighted

// pluginsOfType returns the plugins of the list that implement the interface T.
func pluginsOfType[T any](list []Weighted) []T {
	var out []T
	for _, w := range list {
		if t, ok := w.Plugin.(T); ok {
			out = append(out, t)
		}
	}
	return slices.Clip(out)
}
