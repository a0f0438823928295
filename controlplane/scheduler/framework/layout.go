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

// QueuePlugins contains the plugins of a profile that the scheduling queue calls. Requeues
// contains, by name, the plugins that decide which events make the queue try a refused pod again.
type QueuePlugins struct {
	Sort        QueueSort
	PreEnqueues []PreEnqueue
	Requeues    map[string]Requeue
}

// BindingPlugins contains the plugins of a profile that run after a node was chosen: from Reserve
// to PostBind.
type BindingPlugins struct {
	Reserves  []Reserve
	Permits   []Permit
	PreBinds  []PreBind
	Binds     []Bind
	PostBinds []PostBind
}

// Points returns all extension points in the order in which a pod passes them.
func Points() []Point {
	return []Point{AtPreEnqueue, AtQueueSort, AtPreFilter, AtFilter, AtPostFilter, AtPreScore, AtScore,
		AtReserve, AtPermit,
		AtPreBind, AtBind, AtPostBind}
}

// Has reports whether the plugin p implements the extension point.
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

// Layout contains the plugins of a profile by extension point, in the order in which they run.
// Their weights have an effect only at the extension point Score.
type Layout map[Point][]WeightedPlugin

// pluginsOfType returns the plugins in the list that implement T, the interface of an extension
// point.
func pluginsOfType[T any](list []WeightedPlugin) []T {
	var out []T
	for _, w := range list {
		if t, ok := w.Plugin.(T); ok {
			out = append(out, t)
		}
	}
	return slices.Clip(out)
}
