// Package plugins contains the default profile, and builds the plugins of a configured profile.
package plugins

import (
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/balancedallocation"
	"keelson.dev/keelson/controlplane/scheduler/plugins/defaultbinder"
	"keelson.dev/keelson/controlplane/scheduler/plugins/defaultpreemption"
	"keelson.dev/keelson/controlplane/scheduler/plugins/dynamicresources"
	"keelson.dev/keelson/controlplane/scheduler/plugins/gangscheduling"
	"keelson.dev/keelson/controlplane/scheduler/plugins/imagelocality"
	"keelson.dev/keelson/controlplane/scheduler/plugins/interpodaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodeaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodedeclaredfeatures"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodename"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodeports"
	"keelson.dev/keelson/controlplane/scheduler/plugins/noderesourcesfit"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodeunschedulable"
	"keelson.dev/keelson/controlplane/scheduler/plugins/nodevolumelimits"
	"keelson.dev/keelson/controlplane/scheduler/plugins/podtopologyspread"
	"keelson.dev/keelson/controlplane/scheduler/plugins/prioritysort"
	"keelson.dev/keelson/controlplane/scheduler/plugins/schedulinggates"
	"keelson.dev/keelson/controlplane/scheduler/plugins/tainttoleration"
	"keelson.dev/keelson/controlplane/scheduler/plugins/volumebinding"
	"keelson.dev/keelson/controlplane/scheduler/plugins/volumerestrictions"
	"keelson.dev/keelson/controlplane/scheduler/plugins/volumezone"
)

// Default returns the plugins of the default profile, with their weights. Filter plugins run in
// this order, so those that are cheap or refuse many nodes come first.
func Default(h *framework.Handle) []framework.WeightedPlugin {
	return []framework.WeightedPlugin{
		{Plugin: schedulinggates.Plugin{}},
		{Plugin: prioritysort.Plugin{}},
		{Plugin: gangscheduling.Plugin{H: h}},
		{Plugin: nodeunschedulable.Plugin{}},
		{Plugin: nodename.Plugin{}},
		{Plugin: nodedeclaredfeatures.Plugin{}},
		{Plugin: tainttoleration.Plugin{}, Weight: 3},
		{Plugin: nodeaffinity.Plugin{}, Weight: 2},
		{Plugin: nodeports.Plugin{}},
		{Plugin: noderesourcesfit.Plugin{}, Weight: 1},
		{Plugin: volumerestrictions.Plugin{H: h}},
		{Plugin: nodevolumelimits.Plugin{H: h}},
		{Plugin: volumebinding.New(h, volumebinding.NewPromises(), volumebinding.DefaultPatience)},
		{Plugin: volumezone.Plugin{H: h}},
		{Plugin: podtopologyspread.Plugin{}, Weight: 2},
		{Plugin: interpodaffinity.Plugin{}, Weight: 2},
		{Plugin: dynamicresources.New(h, dynamicresources.NewLedger(), dynamicresources.DefaultSearch,
			dynamicresources.DefaultPatience), Weight: 2},
		{Plugin: defaultpreemption.Plugin{H: h}},
		{Plugin: balancedallocation.Plugin{}, Weight: 1},
		{Plugin: imagelocality.Plugin{}, Weight: 1},
		{Plugin: defaultbinder.Plugin{H: h}},
	}
}
